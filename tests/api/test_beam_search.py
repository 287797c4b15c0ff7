"""`use_beam_search` over HTTP: what `LLM.beam_search` finds, as choices."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from quire import LLM, BeamSearchParams
from quire.engine.inprocess import InProcessClient
from quire.foundation.clock import SystemClock
from quire.foundation.messages.from_engine import Heartbeat, Load
from quire.runtime.executor.cpu_executor import CpuExecutor
from quire.serving.api import beam_search_request
from tests.api.scripted import READY, ScriptedClient
from tests.api.server import Pace, Server, resolved, running
from tests.api.test_lifetimes import connect, eventually, head, in_background
from tests.checkpoints import make_llama
from tests.reference import Reference

PROMPTS = [[5, 6, 7], [100, 200, 300, 4]]
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small weights, so that an end of sequence is never far from likely."""
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1, std=0.06)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Iterator[Server]:
    config = resolved(checkpoint, **SETTINGS)
    with Server(config, lambda: InProcessClient(config, CpuExecutor(config, SystemClock()))) as server:
        yield server.wait_ready()


@pytest.mark.parametrize("length_penalty", [1.0, -2.0])
def test_completions_are_what_is_found_offline(model: Server, checkpoint: Path, length_penalty: float) -> None:
    with LLM(str(checkpoint), **SETTINGS) as llm:
        params = BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=length_penalty)
        found = llm.beam_search(PROMPTS, params)
    client = openai.OpenAI(base_url=model.url + "/v1", api_key="none", max_retries=0)
    body = {"use_beam_search": True, "length_penalty": length_penalty, "return_token_ids": True}
    answer = client.completions.create(model="tiny", prompt=PROMPTS, n=3, max_tokens=8, temperature=0, extra_body=body)
    expected = [
        (sequence.tokens[len(prompt) :], sequence.finish_reason, sequence.stop_reason)
        for prompt, output in zip(PROMPTS, found, strict=True)
        for sequence in output.sequences
    ]
    shown: list[Any] = list(answer.choices)
    assert [(choice.token_ids, choice.finish_reason, choice.stop_reason) for choice in shown] == expected
    decode = model.text.tokenizer.decode  # type: ignore[union-attr]
    assert [choice.text for choice in shown] == [decode(tokens) for tokens, _, _ in expected]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 7
    assert answer.usage.completion_tokens == sum(len(tokens) for tokens, _, _ in expected)


def test_log_probabilities_are_the_models(model: Server, checkpoint: Path) -> None:
    """Of each token, and of the likeliest in its place; also more of these than the search takes."""
    reference = Reference(checkpoint)
    body = {"prompt": PROMPTS[0], "use_beam_search": True, "max_tokens": 6, "return_tokens_as_token_ids": True}
    for n, top in ((3, 2), (1, 7), (2, 0)):
        choices = model.post("/v1/completions", body | {"n": n, "logprobs": top, "return_token_ids": True}).json()[
            "choices"
        ]
        assert len(choices) == n
        for choice in choices:
            rows = reference.logprobs([*PROMPTS[0], *choice["token_ids"]])[len(PROMPTS[0]) - 1 :]
            shown = choice["logprobs"]
            assert len(shown["tokens"]) == len(choice["token_ids"])
            for row, token, logprob, likeliest in zip(
                rows, choice["token_ids"], shown["token_logprobs"], shown["top_logprobs"], strict=False
            ):
                assert logprob == pytest.approx(float(row[token]), abs=2e-3)
                names = [f"token_id:{other}" for other in sorted(range(len(row)), key=lambda other: -row[other])[:top]]
                assert set(likeliest) == {*names, f"token_id:{token}"}
    with LLM(str(checkpoint), **SETTINGS) as llm:
        (found,) = llm.beam_search(PROMPTS[:1], BeamSearchParams(beam_width=2, max_tokens=6))
    for choice, sequence in zip(choices, found.sequences, strict=True):
        if sequence.finish_reason == "length":  # else the end counts too, which is not shown
            assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(sequence.cum_logprob, abs=1e-4)


def test_a_stream_says_what_the_whole_answer_says(model: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beam_search_request, "PIECE_TOKENS", 3)
    client = openai.OpenAI(base_url=model.url + "/v1", api_key="none", max_retries=0)
    asked: Any = {"model": "tiny", "n": 2, "max_tokens": 8, "temperature": 0, "extra_body": {"use_beam_search": True}}
    whole = client.completions.create(prompt=PROMPTS, logprobs=2, **asked)
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.completions.create(prompt=PROMPTS, logprobs=2, **asked, **options)
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        offsets = [offset for part in parts if part.logprobs for offset in part.logprobs.text_offset or ()]
        assert choice.logprobs
        assert offsets == choice.logprobs.text_offset
    assert last.usage == whole.usage
    messages: Any = [{"role": "user", "content": "a"}]
    said = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=3, **asked).choices
    streamed = list(
        client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=3, stream=True, **asked)
    )
    for one in said:
        deltas = [part for chunk in streamed for part in chunk.choices if part.index == one.index]
        assert deltas[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in deltas) == one.message.content
        assert deltas[-1].finish_reason == one.finish_reason
        assert one.logprobs
        assert [entry for part in deltas if part.logprobs for entry in part.logprobs.content or ()] == [
            type(entry).model_validate(entry.model_dump()) for entry in one.logprobs.content or ()
        ]


def test_chat_echo_and_a_truncated_prompt(model: Server) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "use_beam_search": True, "n": 2, "max_tokens": 3}
    answer = model.post("/v1/chat/completions", body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["message"]["role"] == "assistant"
    body = {"prompt": [9, 9, 5, 6, 7], "truncate_prompt_tokens": 3, "max_tokens": 4, "use_beam_search": True}
    cut, whole = (
        model.post("/v1/completions", fields | {"echo": True, "return_token_ids": True}).json()["choices"]
        for fields in (body, body | {"prompt": [5, 6, 7]})
    )
    assert cut == whole


def test_nothing_is_held_afterwards(model: Server) -> None:
    model.assert_all_free()


def test_a_drain_waits_for_the_whole_search(tmp_path: Path) -> None:
    """Also between two steps, when the engine has nothing of it."""
    with running(tmp_path, sample=(pace := Pace())) as server:
        body = {"prompt": "a", "max_tokens": 60, "use_beam_search": True, "n": 2}
        thread, result = in_background(lambda: server.post("/v1/completions", body))
        eventually(lambda: server.session.num_sequences > 0)
        server.loop.call_soon_threadsafe(server.session.begin_drain)
        eventually(lambda: server.session.state == "draining")
        pace.hurry()
        assert server.in_loop(server.session.drain(60)) is True
        assert server.session.num_sequences == 0
        thread.join()
        assert result[0].status_code == 200
        assert result[0].json()["usage"]["completion_tokens"] == 120
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 503


@contextlib.contextmanager
def asked(server: Server, body: dict[str, Any]) -> Iterator[None]:
    """A request whose client leaves at the end."""
    encoded = json.dumps(body).encode()
    with connect(server) as connection:
        connection.sendall(head(encoded) + encoded)
        yield


def test_a_client_that_leaves_ends_the_search(tmp_path: Path) -> None:
    client = ScriptedClient()
    client.say(READY)
    with running(tmp_path, client=lambda: client) as server:
        body = {"prompt": "a", "max_tokens": 60, "use_beam_search": True}
        with asked(server, body):
            (add,) = client.wait_for_adds(1)
        eventually(lambda: client.aborted == [add.id])
        threading.Event().wait(0.05)
        assert len(client.adds) == 1


def test_it_is_turned_away_by_all_that_its_beams_will_compute(tmp_path: Path) -> None:
    client = ScriptedClient()
    client.say(READY)
    with running(tmp_path, client=lambda: client) as server:
        queue = Load(running=16, waiting=50, queued_tokens=15_000, tokens_per_s=1_000.0)  # 30,000 are the limit
        client.say(Heartbeat(time.monotonic(), time.monotonic(), queue))
        eventually(lambda: server.session.stats.engines[0].load == queue)
        body = {"prompt": ["a"] * 20, "max_tokens": 500, "use_beam_search": True}
        assert server.post("/v1/completions", body | {"n": 10}).status_code == 429
        with asked(server, body | {"n": 1}):
            assert len(client.wait_for_adds(20)) == 20
