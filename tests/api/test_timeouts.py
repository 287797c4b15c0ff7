"""How long a request may take: 504 for one that was not begun, and what there is for any other."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.foundation.clock import SystemClock
from quire.foundation.messages.from_engine import Deltas, End, Ready
from tests.api.scripted import READY, ScriptedClient
from tests.api.server import KEY, Server, count_up, resolved, running
from tests.api.test_lifetimes import eventually, in_background

LONG = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}


LONGEST_S = 600.0


class Hours:
    """The clock of the server's processes, which the test sets forward; and a model whose tenth token may take long on
    it. So a request ends by its time limit in the middle, on any machine.

    Attributes:
        tenth_token_s: How long that one takes.
    """

    def __init__(self) -> None:
        self.tenth_token_s = 0.0
        self._passed = 0.0

    def now(self) -> float:
        return time.monotonic() + self._passed

    def pass_by(self, seconds: float) -> None:
        self._passed += seconds

    def sample(self, history: Sequence[int], drawn: int, vocab_size: int) -> int:
        if drawn == 9:
            self.pass_by(self.tenth_token_s)
        return count_up(history, drawn, vocab_size)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Hours]]:
    """One request runs at a time, 20 ms a token; the longest may take 10 minutes."""
    hours, directory = Hours(), tmp_path_factory.mktemp("model")
    settings = {"max_num_seqs": 1, "max_request_timeout": LONGEST_S}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SystemClock, "now", lambda clock: hours.now())
        with running(directory, step_s=0.02, sample=hours.sample, **settings) as server:
            yield server, hours


@pytest.fixture
def server(slow: tuple[Server, Hours]) -> Iterator[Server]:
    """Whose tenth token takes a minute."""
    server, hours = slow
    hours.tenth_token_s = 60.0
    yield server
    hours.tenth_token_s = 0.0


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["field", "header"])
def test_what_there_is_when_the_time_is_over(server: Server, stream: bool, way: str) -> None:
    body = LONG | {"stream": stream} | ({"timeout": 60} if way == "field" else {})
    answer = server.post("/v1/completions", body, headers={"X-Request-Timeout": "60"} if way == "header" else {})
    assert answer.status_code == 200
    if stream:
        *_, last = events(answer.text)
        text = "".join(event["choices"][0]["text"] for event in events(answer.text))
    else:
        last = answer.json()
        text = last["choices"][0]["text"]
        assert last["usage"]["completion_tokens"] == len(text)
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == ("length", "timeout")
    assert 10 <= len(text) <= 12, "nothing is planned any more once it is known, and two steps are in flight"
    assert 'finished_reason="timeout"' in server.get("/metrics").text
    server.assert_all_free()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/api/generate"])
def test_a_request_that_was_not_begun_is_504(slow: tuple[Server, Hours], stream: bool, path: str) -> None:
    server, hours = slow
    chat = path in ("/v1/chat/completions", "/v1/messages")
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5} if chat else {"prompt": "a"}
    body, headers = asked | {"stream": stream, "model": "tiny"}, {"X-Request-Timeout": "60"}
    holder = server.http.build_request("POST", server.url + "/v1/completions", json=LONG | {"stream": True})
    held = server.http.send(holder, stream=True)
    thread, result = in_background(lambda: server.post(path, body, headers=headers))
    eventually(lambda: server.session.num_sequences == 2)
    hours.pass_by(60)
    thread.join()
    held.close()
    (answer,) = result
    assert answer.status_code == 504, answer.text
    assert "time was over" in answer.text
    server.assert_all_free()


def test_nobody_takes_longer_than_the_server_allows(slow: tuple[Server, Hours]) -> None:
    server, hours = slow
    hours.tenth_token_s = LONGEST_S
    for asked in ({}, {"timeout": 1_000}):
        answer = server.post("/v1/completions", LONG | asked).json()
        assert answer["choices"][0]["stop_reason"] == "timeout"
        assert 10 <= answer["usage"]["completion_tokens"] <= 12
    hours.tenth_token_s = 0.0


def test_other_apis_end_as_by_their_token_limit(server: Server) -> None:
    headers = {"X-Request-Timeout": "60"}
    messages = [{"role": "user", "content": "a"}]
    body = {"model": "tiny", "max_tokens": 400, "messages": messages}
    answer = server.post("/v1/messages", body, headers=headers).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    answer = server.post("/api/chat", {"model": "tiny", "messages": messages, "stream": False}, headers=headers).json()
    assert answer["done_reason"] == "length"
    answer = server.post("/v1/responses", {"model": "tiny", "input": "a"}, headers=headers).json()
    assert answer["status"] == "incomplete"
    server.assert_all_free()


@pytest.mark.parametrize("timeout", [0, -1, "x", True])
def test_a_timeout_is_seconds_above_0(server: Server, timeout: Any) -> None:
    answer = server.post("/v1/completions", LONG | {"timeout": timeout})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout")
    answer = server.post("/v1/completions", LONG, headers={"X-Request-Timeout": str(timeout)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-Timeout")


@pytest.mark.parametrize("timeout", ["nan", "inf", "1e400", "5 s"])
def test_a_header_is_a_plain_number(server: Server, timeout: str) -> None:
    assert server.post("/v1/completions", LONG, headers={"X-Request-Timeout": timeout}).status_code == 400


def test_of_several_choices_those_that_have_begun_are_returned(tmp_path: Path) -> None:
    client = ScriptedClient()
    with Server(resolved(tmp_path), lambda: client) as server:
        client.say(READY)
        server.wait_ready()
        assert isinstance(server.session.ready, Ready)
        answer: list[Any] = []
        thread = threading.Thread(
            target=lambda: answer.append(server.post("/v1/completions", LONG | {"n": 2, "timeout": 60}))
        )
        thread.start()
        first, second = client.wait_for_adds(2)
        assert first.deadline == second.deadline
        assert first.deadline is not None
        assert first.deadline - first.arrival == pytest.approx(60, abs=5)
        client.say(Deltas([first.id], [1], [70], ends=[End(first.id, "timeout"), End(second.id, "timeout")]))
        thread.join(20)
        choices = answer[0].json()["choices"]
        assert [choice["stop_reason"] for choice in choices] == ["timeout", "timeout"]
        assert [bool(choice["text"]) for choice in choices] == [True, False]


def test_tenants_are_told_apart_by_key_and_header(tmp_path: Path) -> None:
    client = ScriptedClient()
    config = resolved(tmp_path, api_key=(KEY, "another"), tenant_header="X-Team")
    with Server(config, lambda: client) as server:
        client.say(READY)
        server.wait_ready()
        tenants = {}
        for key, team in ((KEY, None), ("another", None), (KEY, "a"), (KEY, "b"), ("another", "a")):
            headers = {"Authorization": f"Bearer {key}"} | ({"X-Team": team} if team else {})
            with server.http.stream(
                "POST", server.url + "/v1/completions", json=LONG | {"stream": True}, headers=headers
            ):
                tenants[key, team] = client.wait_for_adds(len(tenants) + 1)[-1].tenant
        assert len(set(tenants.values())) == 5
        assert not any(KEY in tenant or "a secret" in tenant for tenant in tenants.values())
        with server.http.stream(
            "POST",
            server.url + "/v1/completions",
            json=LONG | {"stream": True},
            headers={"Authorization": f"Bearer {KEY}"},
        ):
            assert client.wait_for_adds(6)[-1].tenant == tenants[KEY, None]


def test_without_keys_and_headers_all_are_one(tmp_path: Path) -> None:
    client = ScriptedClient()
    with Server(resolved(tmp_path), lambda: client) as server:
        client.say(READY)
        server.wait_ready()
        headers = {"X-Team": "a", "Authorization": "Bearer anything"}
        with server.http.stream("POST", server.url + "/v1/completions", json=LONG | {"stream": True}, headers=headers):
            (add,) = client.wait_for_adds(1)
            assert (add.tenant, add.deadline) == ("", None)
