"""A line for each request with what it cost, and never with what it said."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.engine.metrics.stats import Stats
from quire.foundation.messages.to_engine import Add
from quire.foundation.processes.logs import FIELDS, JsonFormatter
from quire.sampling_params import SamplingParams
from quire.serving.api.request_record import RequestCost, RequestRecord
from quire.serving.api.session.output_collector import OutputCollector
from tests.api.server import Server, running

SECRET = "a-very-secret-word"


class Lines(logging.Handler):
    """Keeps what is logged, as JSON would have it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []
        self.setFormatter(JsonFormatter("api"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))

    def of(self, request_id: str) -> dict[str, Any]:
        """The only line of a request; it may come a moment after its last byte."""
        deadline = time.monotonic() + 20
        while not (found := [line for line in self.lines if line.get("request_id") == request_id]):
            assert time.monotonic() < deadline, request_id
            time.sleep(0.005)
        (line,) = found
        return line


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("model"), api_key=("a key",)) as server:
        server.http.headers["Authorization"] = "Bearer a key"
        yield server


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    logger, handler = logging.getLogger("quire.access"), Lines()
    logger.addHandler(handler)
    with caplog.at_level(logging.INFO, logger.name):
        yield handler
    logger.removeHandler(handler)


def ask(server: Server, request_id: str, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
    return server.post(path, body, headers={"X-Request-Id": request_id})


def test_the_line_has_what_the_request_cost(server: Server, lines: Lines) -> None:
    answer = ask(server, "cost-1", {"prompt": SECRET * 3, "max_tokens": 5, "n": 2, "ignore_eos": True})
    usage, line = answer.json()["usage"], lines.of("cost-1")
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["completion_tokens"] == usage["completion_tokens"] == 10
    assert (line["sequences"], line["finish_reasons"], line["preemptions"]) == (2, ["length"], 0)
    assert line["queue_s"] + line["prefill_s"] + line["decode_s"] <= line["duration_s"] + 0.002
    assert 0 <= line["first_token_s"] <= line["duration_s"]
    assert line["tenant"]
    assert ask(server, "cost-2", {"prompt": SECRET * 3, "max_tokens": 1}).status_code == 200
    assert lines.of("cost-2")["cached_tokens"] > 0


def test_a_stream_is_logged_when_it_is_over(server: Server, lines: Lines) -> None:
    answer = ask(server, "stream-1", {"prompt": SECRET, "max_tokens": 7, "stream": True, "ignore_eos": True})
    assert answer.text.endswith("data: [DONE]\n\n")
    assert lines.of("stream-1")["completion_tokens"] == 7


def test_a_stop_string_leaves_out_what_only_the_engine_would_know(server: Server, lines: Lines) -> None:
    answer = ask(server, "stop-1", {"prompt": "a", "max_tokens": 400, "stop": ["efg"]})
    line = lines.of("stop-1")
    assert line["completion_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert line["finish_reasons"] == ["stop"]
    assert "queue_s" not in line
    assert line["first_token_s"] <= line["duration_s"]


def test_tokens_that_no_reader_got_are_not_counted() -> None:
    """What the engine samples behind a stop string, before it hears of it."""
    add = Add(1, [3, 4], 2, SamplingParams(), [], seed=0, arrival=1.0)
    stats = Stats()
    sequence = stats.start_sequence(add)
    stats.record_tokens(sequence, 5, now=1.5)
    stats.record_delivered(sequence, 3)
    stats.finish_sequence(sequence, "stop", now=2.0)
    cost = RequestRecord(1.0, 2.0, 200, [OutputCollector([add], [sequence])]).cost()
    assert cost == RequestCost(1, 2, 0, 3, 0.5, None, None, None, 0, ("stop",))


def test_a_client_that_goes_away_is_logged(server: Server, lines: Lines) -> None:
    body = {"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", server.url + "/v1/completions", json=body, headers={"X-Request-Id": "gone-1"}) as r:
        next(r.iter_lines())
    assert lines.of("gone-1")["finish_reasons"] in (["abort"], ["length"])


def test_a_refused_request_has_no_cost_and_a_probe_no_line(server: Server, lines: Lines) -> None:
    assert ask(server, "wrong-1", {"prompt": SECRET, "max_tokens": -1}).status_code == 400
    assert httpx.get(server.url + "/v1/models", headers={"X-Request-Id": "no-key"}).status_code == 401
    for probe in ("/health", "/ready", "/metrics", "/load"):
        server.get(probe, headers={"X-Request-Id": "probe"})
    assert "completion_tokens" not in lines.of("wrong-1")
    assert lines.of("no-key")["status"] == 401
    assert [line for line in lines.lines if line["request_id"] == "probe"] == []


def test_nothing_that_was_said_is_in_the_log(server: Server, lines: Lines) -> None:
    ask(server, "quiet-1", {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 9}, "/v1/chat/completions")
    ask(server, "quiet-2", {"prompt": SECRET, "max_tokens": 9}, f"/v1/completions?word={SECRET}")
    ask(server, "quiet-3", {"prompt": SECRET}, "/a%0Ab")
    assert lines.of("quiet-3")["path"] == "/a%0Ab"  # no second line can be written into the log
    lines.of("quiet-1"), lines.of("quiet-2")
    assert SECRET not in json.dumps(lines.lines)


def test_every_request_is_logged_once(server: Server, lines: Lines) -> None:
    for number in range(100):
        ask(server, f"many-{number}", {"prompt": "a", "max_tokens": 1})
    lines.of("many-99")
    assert len([line for line in lines.lines if line["request_id"].startswith("many-")]) == 100


def test_the_text_has_the_same(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quire.access"):
        ask(server, "text-1", {"prompt": "abc", "max_tokens": 2, "ignore_eos": True})
        deadline = time.monotonic() + 20
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.005)
    (message,) = caplog.messages
    assert '- "POST /v1/completions HTTP/1.1" 200 request_id=text-1 duration_s=' in message
    assert " completion_tokens=2 " in message
    assert message.endswith(" finish_reasons=length")


def test_without_an_access_log_nobody_takes_notes(tmp_path: Path, lines: Lines) -> None:
    with running(tmp_path, disable_uvicorn_access_log=True) as server:
        assert "log_access" not in str(server.app.user_middleware)
        ask(server, "off-1", {"prompt": "a", "max_tokens": 1})
    assert lines.lines == []


def test_json_has_a_traceback_in_its_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        failure = (type(error), error, error.__traceback__)
    record = logging.LogRecord("quire.x", logging.ERROR, "x.py", 1, "went %s\nwrong", ("very",), failure)
    setattr(record, FIELDS, {"request_id": "r", "odd": Path("/tmp")})
    (line,) = JsonFormatter("engine").format(record).splitlines()
    fields = json.loads(line)
    assert (fields["message"], fields["level"], fields["process"]) == ("went very wrong", "error", "engine")
    assert "ValueError: broken" in fields["traceback"]
    assert (fields["request_id"], fields["odd"]) == ("r", "/tmp")
