"""Sampling fields over HTTP: they reach the engine, and what they ask for stands in the answers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from quire.engine.inprocess import InProcessClient
from quire.foundation.clock import SystemClock
from quire.foundation.messages.to_engine import Add, ToEngine
from quire.runtime.executor.cpu_executor import CpuExecutor
from tests.api.server import Server, resolved, running
from tests.checkpoints import VOCAB_SIZE, make_llama

CHAT = {"messages": [{"role": "user", "content": "a"}]}


def added(server: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]) -> Add:
    """The first sequence that a request sends to the engine."""
    seen: list[Add] = []
    engine = server.session.engines[0].connection
    send = engine.send

    def watch(message: ToEngine) -> None:
        if isinstance(message, Add):
            seen.append(message)
        send(message)

    monkeypatch.setattr(engine, "send", watch)
    answer = server.post(path, body)
    monkeypatch.undo()
    assert answer.status_code == 200, answer.text
    return seen[0]


@pytest.mark.parametrize(("path", "head"), [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)])
def test_every_field_reaches_the_engine(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, head: dict[str, Any]
) -> None:
    fields = {
        "presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.25, "allowed_token_ids": [5, 6, 9],
        "prompt_logprobs": 2, "logprob_token_ids": [5, 6], "truncate_prompt_tokens": 300, "min_tokens": 1,
    }  # fmt: skip
    rest = {
        "logit_bias": {"5": 250, "6": -3.5}, "bad_words": ["xy"], "cache_salt": "me", "n": 2, "best_of": 2,
        "repetition_detection": {"max_pattern_size": 4, "min_count": 3}, "priority": 0, "vllm_xargs": {},
    }  # fmt: skip
    message = added(server, monkeypatch, path, {**head, "max_tokens": 3, **fields, **rest})
    sampling = message.sampling
    for name, value in fields.items():
        assert getattr(sampling, name) == value, name
    assert sampling.logit_bias == {5: 100.0, 6: -3.5}
    assert sampling.repetition_detection is not None
    assert (sampling.repetition_detection.max_pattern_size, sampling.repetition_detection.min_count) == (4, 3)
    assert message.cache_salt == "me"
    assert message.bad_words == [server.text.tokenizer.encode("xy", False)]  # type: ignore[union-attr]


def test_neutral_values_ask_for_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "a", "max_tokens": 1, "logit_bias": {}, "bad_words": [], "presence_penalty": 0, "priority": 0}
    message = added(server, monkeypatch, "/v1/completions", body)
    assert not message.sampling.penalizes
    assert (message.bad_words, message.priority, message.cache_salt) == ([], 0, "")


def test_priority_is_taken_where_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, scheduling_policy="priority") as server:
        message = added(server, monkeypatch, "/v1/completions", {"prompt": "a", "max_tokens": 1, "priority": -7})
        assert message.priority == -7


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_stand_in_the_usage(tmp_path: Path, stream: bool) -> None:
    """A prefix that was computed before is found, but under another salt it is not."""
    with running(tmp_path) as server:

        def cached(salt: str, stop: str) -> int:
            body = {"prompt": [7] * 100, "max_tokens": 3, "cache_salt": salt, "stop": stop, "stream": stream}
            if not stream:
                return int(
                    server.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                )
            text = server.post("/v1/completions", body | {"stream_options": {"include_usage": True}}).text
            return int(text.split('"cached_tokens":')[-1].split("}")[0])

        assert cached("x", "never") == 0
        assert cached("x", "never") == 96
        assert cached("x", "i") == 96  # the stop string comes before the engine's end
        assert cached("y", "never") == 0


def test_prompt_logprobs_stand_in_vllms_shape(server: Server) -> None:
    """The fake engine says that a token's log probability is its place, negative, and names those behind it."""
    body = {"prompt": [[5, 6, 9], [40, 41]], "max_tokens": 1, "prompt_logprobs": 1, "n": 2}
    choices = server.post("/v1/completions", body).json()["choices"]
    assert len(choices) == 4
    for choice, prompt in zip(choices, ([5, 6, 9], [5, 6, 9], [40, 41], [40, 41]), strict=True):
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert [list(entry) for entry in others] == [[str(t), str(t + 1)] for t in prompt[1:]]
        for place, (token, entry) in enumerate(zip(prompt[1:], others, strict=True), start=1):
            assert entry[str(token)] == {
                "logprob": -float(place), "rank": 2,
                "decoded_token": server.text.tokenizer.decode([token], False),  # type: ignore[union-attr]
            }  # fmt: skip
    chat = server.post("/v1/chat/completions", CHAT | {"prompt_logprobs": 0, "max_tokens": 1}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert (
        "prompt_logprobs" not in server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).json()["choices"][0]
    )


def test_echo_puts_the_prompt_first(server: Server) -> None:
    plain, echoed = (
        server.post("/v1/completions", {"prompt": ["abc", "xy"], "max_tokens": 3, "echo": echo}).json()["choices"]
        for echo in (False, True)
    )
    assert [choice["text"] for choice in echoed] == ["abc" + plain[0]["text"], "xy" + plain[1]["text"]]


def test_echo_with_logprobs_scores_the_prompt(server: Server) -> None:
    body = {"prompt": "abc", "max_tokens": 2, "echo": True, "logprobs": 1}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    shown, prompt = choice["logprobs"], server.text.tokenizer.encode("abc")  # type: ignore[union-attr]
    assert "".join(shown["tokens"]) == choice["text"]
    assert shown["token_logprobs"] == [None, *(-float(i) for i in range(1, len(prompt))), -0.5, -0.5]
    assert shown["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in shown["top_logprobs"][1 : len(prompt)])
    assert shown["text_offset"] == [sum(map(len, shown["tokens"][:i])) for i in range(len(shown["tokens"]))]
    assert "prompt_logprobs" not in choice


def test_a_prompt_alone_is_scored_without_an_answer(server: Server) -> None:
    """What evaluation harnesses send: max_tokens 0."""
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = server.post("/v1/completions", body).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert "".join(choice["logprobs"]["tokens"]) == "abc"
    assert len(choice["logprobs"]["token_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0


def test_echo_in_a_stream_comes_first(server: Server) -> None:
    body = {"prompt": "abc", "max_tokens": 3, "echo": True, "stream": True}
    lines = [line for line in server.post("/v1/completions", body).text.splitlines() if line]
    assert '"text":"abc"' in lines[0]
    assert sum('"text":"abc"' in line for line in lines) == 1


def test_an_answer_that_goes_in_circles_says_so(tmp_path: Path) -> None:
    with running(tmp_path, sample=lambda history, drawn, vocab: 70 + drawn % 2) as server:
        body = {"prompt": "a", "max_tokens": 50, "repetition_detection": {"max_pattern_size": 3, "min_count": 3}}
        answer = server.post("/v1/completions", body).json()
        assert answer["choices"][0]["finish_reason"] == "repetition"
        assert answer["usage"]["completion_tokens"] == 6
        assert 'finished_reason="repetition"' in server.get("/metrics").text


def test_named_tokens_and_all_tokens(tmp_path: Path) -> None:
    """Over a real model: chat with named tokens, completions with the whole vocabulary."""
    directory = make_llama(tmp_path / "model")
    config = resolved(directory, dtype="float32", num_gpu_blocks_override=64, max_logprobs=-1)
    with Server(config, lambda: InProcessClient(config, CpuExecutor(config, SystemClock()))) as server:
        server.wait_ready()
        chat = server.post("/v1/chat/completions", CHAT | {"logprob_token_ids": [9, 5], "max_tokens": 2}).json()
        for entry in chat["choices"][0]["logprobs"]["content"]:
            names = [top["token"] for top in entry["top_logprobs"]]
            assert names == [server.text.tokenizer.decode([t]) for t in (9, 5)]  # type: ignore[union-attr]
        body = {"prompt": "a", "logprobs": -1, "prompt_logprobs": -1, "max_tokens": 1, "temperature": 0}
        (choice,) = server.post("/v1/completions", body | {"prompt": "abc"}).json()["choices"]
        assert sum(math.exp(e["logprob"]) for e in choice["prompt_logprobs"][1].values()) == pytest.approx(1, abs=1e-3)
        assert len(choice["prompt_logprobs"][1]) == VOCAB_SIZE
