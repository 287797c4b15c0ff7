"""Flags that change what answers say or how they are made: keep-alive comments, metrics, efforts and strictness."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import CompletionUsage

from quire.errors import ConfigError
from quire.foundation.config import ServerConfig
from quire.foundation.messages.from_engine import Deltas, End
from tests.api.scripted import READY, ScriptedClient
from tests.api.server import Server, resolved
from tests.api.speaker import TEMPLATE, Speaker, speaking
from tests.api.test_tools import MESSAGES, WEATHER

EFFORT = TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n{{ reasoning_effort }}\n", 1)
METRICS = {
    "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second",
}  # fmt: skip


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Speaker]]:
    with speaking(
        tmp_path_factory.mktemp("model"),
        EFFORT,
        max_model_len=2048,
        masked=True,
        reasoning_parser="qwen3",
        special_tokens=["<think>", "</think>"],
        tool_strict_level="parameter",
        reasoning_effort_map={"xhigh": "max", "minimal": "none"},
        enable_per_request_metrics=True,
    ) as both:
        yield both


def ask(both: tuple[Server, Speaker], says: str, **fields: Any) -> dict[str, Any]:
    server, model = both
    model.text = says
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 100, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "Hello"})]
)
def test_answers_and_streams_have_the_times_of_the_request(
    both: tuple[Server, Speaker], path: str, fields: dict[str, Any]
) -> None:
    server, model = both
    model.text = "It is snowy in Oslo."
    body = {**fields, "max_tokens": 5}
    whole = server.post(path, body).json()
    without, with_usage = (
        server.post(path, body | {"stream": True, "stream_options": options}).text.split("\n\n")
        for options in (None, {"include_usage": True})
    )
    last, counted = (json.loads(lines[-3].removeprefix("data: ")) for lines in (without, with_usage))
    assert (last["choices"], "usage" in last) == ([], False)
    assert counted["usage"]["completion_tokens"] == 5
    for said in (whole["metrics"], last["metrics"], counted["metrics"]):
        assert set(said) == METRICS
        assert 0 <= said["queue_time_ms"] <= said["time_to_first_token_ms"]
        assert said["mean_itl_ms"] * 4 == pytest.approx(said["generation_time_ms"], abs=0.01)


def test_usage_has_the_tokens_of_the_reasoning(both: tuple[Server, Speaker]) -> None:
    thought, tokenizer = "Oslo is cold.", both[1].tokenizer
    assert tokenizer is not None
    usage = ask(both, f"<think>{thought}</think>It snows.")["usage"]
    CompletionUsage.model_validate(usage, strict=True)
    of_thought = len(tokenizer.encode(thought, add_special_tokens=False))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": of_thought + 1}  # and the tag that ends it
    plain = ask(both, "It snows.", reasoning_effort="minimal")["usage"]
    assert plain["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(("asked", "shown"), [("xhigh", "max"), ("minimal", "none"), ("low", "low")])
def test_efforts_are_mapped(both: tuple[Server, Speaker], asked: str, shown: str) -> None:
    server, _ = both
    tokens = ask(both, "Yes.", reasoning_effort=asked, return_token_ids=True)["prompt_token_ids"]
    prompt = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert f"<|im_start|>assistant\n{shown}\n" in prompt


def test_calls_of_tools_that_are_not_strict_are_held_to_their_schema(both: tuple[Server, Speaker]) -> None:
    """The model wants to leave the required argument out, which the grammar does not let it."""
    call = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    (choice,) = ask(both, f"<think></think>{call}", tools=[WEATHER], temperature=0)["choices"]
    assert '"city"' in choice["message"]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize("efforts", [{"huge": "high"}, {"high": 3}])
def test_maps_of_unknown_efforts_are_refused(efforts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--reasoning-effort-map must map efforts to efforts"):
        ServerConfig(reasoning_effort_map=efforts)


@pytest.mark.parametrize("fields", [{}, {"timeout": 60.0}], ids=["plain", "with a deadline"])
def test_a_stream_without_anything_to_say_sends_comments(tmp_path: Path, fields: dict[str, Any]) -> None:
    client = ScriptedClient()
    with Server(resolved(tmp_path, sse_keep_alive_interval=0.02), lambda: client) as server:
        client.say(READY)
        server.wait_ready()
        body = {"prompt": "Hello", "max_tokens": 2, "stream": True, **fields}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            assert [next(lines) for _ in range(4)] == [": keep-alive", ""] * 2  # while nothing is generated
            client.say(Deltas([client.adds[0].id], [1], [5]))
            said = next(line for line in lines if line.startswith("data: "))
            assert json.loads(said.removeprefix("data: "))["choices"][0]["finish_reason"] is None
            assert next(line for line in lines if line) == ": keep-alive"  # between tokens, too
            client.say(Deltas([client.adds[0].id], [1], [5], ends=[End(client.adds[0].id, "length")]))
            assert [line for line in lines if line][-1] == "data: [DONE]"
