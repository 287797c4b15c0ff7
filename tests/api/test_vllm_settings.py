"""Settings of a server that have vLLM's names: what streams, logs and bodies are like with them."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.serving.api.stream_response import StreamWriter
from quire.serving.app import create_app
from quire.text.deltas import ChoiceDelta
from tests.api.middleware_examples import Stamp
from tests.api.server import Server, resolved, running
from tests.api.test_sse import chat, events

EXAMPLES = "tests.api.middleware_examples"
SETTINGS: dict[str, Any] = {
    "stream_interval": 4, "enable_force_include_usage": True, "return_tokens_as_token_ids": True,
    "enable_log_requests": True, "max_log_len": 3, "custom_histogram_buckets": {"time_to_first_token": [0.5, 60]},
    "middleware": (f"{EXAMPLES}.Stamp", f"{EXAMPLES}:gate"),
}  # fmt: skip


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("model"), **SETTINGS) as server:
        yield server


class Parts:
    """In place of running choices and their format: each delta passes as it is, and is written as its text."""

    finished = False

    def process(self, index: int, delta: Any) -> ChoiceDelta:
        self.finished = delta.finish_reason is not None
        return delta

    def delta(self, index: int, gained: ChoiceDelta) -> bytes:
        return f"{index}:{gained.text} ".encode()

    def end(self) -> bytes:
        return b"."


def test_each_choice_is_written_at_once_then_by_intervals_and_at_its_end() -> None:
    parts = Parts()
    writer = StreamWriter(parts, parts, "id", interval=3)  # type: ignore[arg-type]
    said = [
        writer._written(index, ChoiceDelta(text, [1], finish_reason="stop" if text == "z" else None))  # type: ignore[arg-type]
        for index, text in [(0, "a"), (1, "A"), (0, "b"), (0, "c"), (0, "d"), (1, "B"), (0, "e"), (0, "z")]
    ]
    assert said == [b"0:a ", b"1:A ", b"", b"", b"0:bcd ", b"", b"", b"0:ez ."]


@pytest.mark.parametrize("n", [1, 2])
def test_a_chunk_has_as_many_tokens_as_the_interval_says(changed: Server, n: int) -> None:
    chunks = events(changed, "/v1/completions", prompt="a", n=n, max_tokens=11, return_token_ids=True)
    for index in range(n):
        own = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
        sizes = [len(choice["token_ids"] or ()) for choice in own if choice["text"]]
        assert all(size >= 4 for size in sizes[1:-1])
        assert sum(sizes) == 11
        assert "".join(choice["text"] for choice in own) == "bcdefghijkl"
    assert chunks[-1]["usage"]["completion_tokens"] == 11 * n


def test_an_interval_leaves_chats_and_stop_strings_as_they_are(changed: Server) -> None:
    chunks = chat(changed, max_tokens=30)
    said = [c["choices"][0] for c in chunks if c["choices"]]
    assert len("".join(each["delta"].get("content") or "" for each in said)) == 30
    assert len(said) < 14  # the role, the first token, seven of four, and the end
    stopped = events(changed, "/v1/completions", prompt="a", max_tokens=40, stop="h")
    assert "".join(c["choices"][0]["text"] for c in stopped if c["choices"]) == "bcdefg"
    assert stopped[-2]["choices"][0]["stop_reason"] == "h"


def test_streams_report_usage_unasked(changed: Server, server: Server) -> None:
    assert chat(changed, max_tokens=3)[-1]["usage"]["completion_tokens"] == 3
    asked = chat(changed, max_tokens=3, stream_options={"include_usage": False, "continuous_usage_stats": True})
    assert asked[-1]["usage"]["completion_tokens"] == 3
    assert all("usage" in chunk for chunk in asked)
    assert all(not chunk.get("usage") for chunk in chat(server, max_tokens=3))
    whole = changed.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
    assert whole.json()["usage"]["completion_tokens"] == 3


def test_log_probabilities_name_tokens_by_id_unless_the_request_says_otherwise(changed: Server) -> None:
    body = {"prompt": "a", "max_tokens": 2, "logprobs": 1}
    named = changed.post("/v1/completions", body).json()["choices"][0]["logprobs"]["tokens"]
    assert all(name.startswith("token_id:") for name in named)
    as_text = {**body, "return_tokens_as_token_ids": False}
    assert changed.post("/v1/completions", as_text).json()["choices"][0]["logprobs"]["tokens"] == ["b", "c"]


def test_logged_texts_have_a_length(changed: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        changed.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "stop": ["zzyyxx"], "bad_words": ["qqrrss"]})
    (line,) = [r.getMessage() for r in caplog.records if "/v1/completions stream=" in r.getMessage()]
    assert '"zzy"' in line
    assert '"qqr"' in line
    assert "zzyy" not in line


def test_middleware_sees_every_request_and_each_part_of_a_stream(changed: Server) -> None:
    before = Stamp.size
    answer = changed.post("/v1/completions", {"prompt": "a", "max_tokens": 20, "stream": True})
    assert answer.headers["x-stamp"] == "class"
    assert answer.text.endswith("data: [DONE]\n\n")
    assert Stamp.size - before == len(answer.content)
    assert changed.http.get(f"{changed.url}/health").headers["x-stamp"] == "class"
    closed = changed.http.get(f"{changed.url}/health", headers={"x-closed": "1"})
    assert (closed.status_code, closed.json()) == (418, {"closed": True})
    assert "x-stamp" not in closed.headers  # the last one gets a request first


@pytest.mark.parametrize(
    ("path", "why"),
    [(f"{EXAMPLES}.Gone", "AttributeError"), ("no_such_package.X", "ModuleNotFoundError"), ("x", "ValueError"),
     (f"{EXAMPLES}.NO_MIDDLEWARE", "it is neither a class nor a coroutine function")],
)  # fmt: skip
def test_middleware_that_cannot_be_used_is_named(path: str, why: str, server: Server, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        create_app(resolved(tmp_path, middleware=(path,)), server.session, server.text)
    assert caught.value.message.startswith(f"--middleware {path} cannot be used: ")


def test_a_server_that_cannot_be_made_leaves_no_store_open(server: Server, tmp_path: Path) -> None:
    store = tmp_path / "store.sqlite"
    settings = {"middleware": ("no_such_package.X",), "responses_store_path": str(store)}
    with pytest.raises(ConfigError):
        create_app(resolved(tmp_path, **settings), server.session, server.text)
    assert store.exists()
    opened = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # another thread has closed it
            opened.append(link.readlink())
    assert not [path for path in opened if path.parent == tmp_path]


@pytest.mark.parametrize(
    ("buckets", "said"),
    [
        ({"latency": [1]}, "has no family 'latency': choose of request_latency, "),
        ({"iteration_tokens": [1]}, "its buckets are fixed"),
        ({"request_latency": [1, 1]}, "each larger than the one before"),
        ({"request_latency": [0, 1]}, "numbers above 0"),
        ({"request_latency": []}, "needs a list of numbers"),
        ({"request_latency": [float("inf")]}, "needs a list of numbers"),
        ({"request_latency": "1"}, "needs a list of numbers"),
    ],
)
def test_buckets_that_cannot_be_meant_are_refused(buckets: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config().with_values(custom_histogram_buckets=buckets)
    assert said in caught.value.message


def test_metrics_have_the_buckets_that_were_asked_for(changed: Server) -> None:
    changed.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
    page = changed.http.get(f"{changed.url}/metrics").text
    found = {
        line.split('le="')[1].split('"')[0] for line in page.splitlines() if "to_first_token_seconds_bucket" in line
    }
    assert found == {"0.5", "60.0", "+Inf"}


def test_no_interval_is_refused() -> None:
    for name in ("stream_interval", "max_log_len"):
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be"):
            Config().with_values(**{name: -1})


# --- fields that nobody knows ---------------------------------------------------------------------------------------

ASKED: dict[str, Any] = {"prompt": "a", "max_tokens": 2}
IGNORED: dict[str, Any] = {
    "cache_prompt": True, "zzz": 1, "typical_p": 1.0, "mirostat": 0, "n_predict": -1, "images": [], "thread": None,
    "verbosity": "low", "slot_id": 3, "keep_alive": "5m",
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "temprature": 1, "maxTokens": 5, "topP": 0.5, "stop-token-ids": [1], "thread": "x", "previous_message_id": "m",
    "typical_p": 0.5, "mirostat": 2, "messages": [], "grammar": "root ::= x", "n_predict": 5,
    "output_kind": 2, "x" * 65: 1,
}  # fmt: skip


def test_unknown_fields_are_ignored_and_named_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            answer = server.post("/v1/completions", {**ASKED, **IGNORED})
            assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == "bc"
    named = [r.getMessage() for r in caplog.records if "is ignored: nothing here reads it" in r.getMessage()]
    assert sum("'cache_prompt'" in line for line in named) == 1


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_misspelt_or_would_change_the_answer_is_refused(server: Server, field: str) -> None:
    answer = server.post("/v1/completions", {**ASKED, field: REFUSED[field]})
    assert answer.status_code == 400, answer.text
    assert f"'{field[:64]}" in answer.json()["error"]["message"]


def test_a_large_body_is_treated_alike(server: Server) -> None:
    large = {**ASKED, "prompt": "a" * 100, "padding": ["x"] * 5_000}
    assert server.post("/v1/completions", large).status_code == 200
    assert server.post("/v1/completions", {**large, "thread": "x"}).status_code == 400


def test_other_dialects_treat_them_alike(conversations: tuple[Server, Any]) -> None:
    server, _ = conversations
    message = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("/v1/messages", {"messages": message, "max_tokens": 5}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 5}),
        ("/v1/chat/completions", {"messages": message, "max_tokens": 5}),
    ):
        assert server.post(path, {**body, "zzz": 1}).status_code == 200
        assert server.post(path, {**body, "thread": "x"}).status_code == 400


def test_all_of_them_can_be_refused(tmp_path: Path) -> None:
    with running(tmp_path, unknown_fields="refuse") as strict:
        answer = strict.post("/v1/completions", {**ASKED, "zzz": 1})
        assert (answer.status_code, json.loads(answer.text)["error"]["param"]) == (400, "zzz")
