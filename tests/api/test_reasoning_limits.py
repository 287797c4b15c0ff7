"""Forms that begin behind reasoning, and budgets that end it: over HTTP, with a model that reasons."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.server import Server
from tests.api.speaker import Speaker, speaking
from tests.api.test_tools import WEATHER

MESSAGES: Any = [{"role": "user", "content": "How is the weather in Oslo?"}]
THOUGHT = "one two three four five six seven eight"
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY | {"additionalProperties": False}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Speaker]]:
    with speaking(
        tmp_path_factory.mktemp("model"),
        special_tokens=["<think>", "</think>"],
        reasoning_parser="qwen3",
        max_model_len=2048,
        masked=True,
    ) as both:
        yield both


@pytest.fixture
def server(both: tuple[Server, Speaker]) -> Server:
    return both[0]


@pytest.fixture
def speaker(both: tuple[Server, Speaker]) -> Speaker:
    return both[1]


def said(server: Server, **fields: Any) -> list[tuple[str, str, str]]:
    """Content, reasoning and finish reason of each choice, the same whole and streamed."""
    body = {"messages": MESSAGES, "max_tokens": 200, **fields}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    whole = [
        (choice["message"]["content"] or "", choice["message"].get("reasoning", ""), choice["finish_reason"])
        for choice in answer.json()["choices"]
    ]
    lines = server.post("/v1/chat/completions", body | {"stream": True}).text.split("\n\n")
    found = [["", "", ""] for _ in whole]
    for line in lines[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            parts = found[choice["index"]]
            parts[0] += choice["delta"].get("content") or ""
            parts[1] += choice["delta"].get("reasoning") or ""
            parts[2] += choice["finish_reason"] or ""
    assert [tuple(parts) for parts in found] == whole
    return whole


def count(speaker: Speaker, text: str) -> int:
    """Tokens of a text."""
    assert speaker.tokenizer is not None
    return len(speaker.tokenizer.encode(text, add_special_tokens=False))


def text_of(speaker: Speaker, text: str, tokens: int) -> str:
    """The first tokens of a text."""
    assert speaker.tokenizer is not None
    return speaker.tokenizer.decode(speaker.tokenizer.encode(text, add_special_tokens=False)[:tokens])


# --- forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_the_form_begins_behind_reasoning_that_the_model_opens(server: Server, speaker: Speaker, n: int) -> None:
    speaker.text = f'<think>\n{THOUGHT}\n</think>\n\n{{"city": "Rome"}} and so on'
    found = said(server, response_format=FORM, n=n, temperature=1)
    assert found == [('{"city": "Rome"}', THOUGHT, "stop")] * n


def test_a_model_that_does_not_reason_has_the_form_at_once(server: Server, speaker: Speaker) -> None:
    speaker.text = "Rome, I think"
    ((content, reasoning, finish),) = said(server, response_format=FORM)
    assert (json.loads(content)["city"] in ("Oslo", "Rome"), reasoning, finish) == (True, "", "stop")


def test_reasoning_that_is_switched_off_cannot_come(server: Server, speaker: Speaker) -> None:
    speaker.text = f"<think>{THOUGHT}</think>yes"
    off = {"enable_thinking": False}
    ((content, reasoning, _),) = said(server, structured_outputs={"choice": ["yes", "no"]}, chat_template_kwargs=off)
    assert content in ("yes", "no")
    assert not reasoning


# --- budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_ends_the_reasoning(server: Server, speaker: Speaker, budget: int) -> None:
    speaker.text = f"<think>{THOUGHT}</think>Snow."
    ((content, reasoning, finish),) = said(server, thinking_token_budget=budget)
    assert reasoning == text_of(speaker, THOUGHT, budget)
    assert content.endswith("</think>Snow.")  # the model goes on with its text, which is the answer's by now
    assert finish == "stop"


@pytest.mark.parametrize("budget", [-1, 500])
def test_a_budget_that_is_not_spent_changes_nothing(server: Server, speaker: Speaker, budget: int) -> None:
    speaker.text = f"<think>{THOUGHT}</think>Snow."
    assert said(server, thinking_token_budget=budget) == [("Snow.", THOUGHT, "stop")]


def test_a_budget_before_a_form(server: Server, speaker: Speaker) -> None:
    speaker.text = f'<think>{THOUGHT}</think>{{"city": "Rome"}}'
    for content, reasoning, finish in said(server, thinking_token_budget=3, response_format=FORM, n=2, temperature=1):
        assert reasoning == text_of(speaker, THOUGHT, 3)
        assert json.loads(content)["city"] in ("Oslo", "Rome")
        assert finish == "stop"


def test_a_budget_before_a_call_that_must_come(server: Server, speaker: Speaker) -> None:
    speaker.text = f"<think>{THOUGHT}</think>{CALL}"
    body = {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required", "thinking_token_budget": 4}
    choice = server.post("/v1/chat/completions", body | {"max_tokens": 300}).json()["choices"][0]
    assert choice["message"]["reasoning"] == text_of(speaker, THOUGHT, 4)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


def test_a_budget_of_completions_and_token_ids(server: Server, speaker: Speaker) -> None:
    assert speaker.tokenizer is not None
    speaker.text = f"{THOUGHT}</think>Snow."
    prompt = "Weather?<think>\n"
    body = {"prompt": [prompt, "Weather?"], "max_tokens": 6, "thinking_token_budget": 2, "skip_special_tokens": False}
    opened, closed = server.post("/v1/completions", body).json()["choices"]
    assert opened["text"].startswith(text_of(speaker, THOUGHT, 2) + "</think>")
    assert closed["text"] == text_of(speaker, THOUGHT, 6)
    end = speaker.tokenizer.token_id("</think>")
    ids = {"token_ids": speaker.tokenizer.encode(prompt, add_special_tokens=False)}
    generated = server.post(
        "/inference/v1/generate", ids | {"sampling_params": {"max_tokens": 4, "thinking_token_budget": 2}}
    )
    assert generated.json()["choices"][0]["token_ids"][2] == end


def test_the_budget_of_anthropics_messages(server: Server, speaker: Speaker) -> None:
    speaker.text = f"<think>{THOUGHT}</think>Snow."
    body = {"messages": MESSAGES, "max_tokens": 100, "thinking": {"type": "enabled", "budget_tokens": 3}}
    thinking, text = server.post("/v1/messages", body).json()["content"]
    assert thinking["thinking"] == text_of(speaker, THOUGHT, 3)
    assert text["text"].endswith("Snow.")


def test_where_reasoning_is_not_told_apart_a_budget_is_dropped(
    tmp_path_factory: pytest.TempPathFactory, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    for value in (-2, 1.5, "x"):
        body = {"messages": MESSAGES, "thinking_token_budget": value}
        answer = server.post("/v1/chat/completions", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget")
    with speaking(tmp_path_factory.mktemp("model"), reasoning_parser="granite", max_model_len=512) as (other, speaker):
        speaker.text = "Snow."
        body = {"max_tokens": 5, "thinking_token_budget": 5}
        assert other.post("/v1/chat/completions", body | {"messages": MESSAGES}).status_code == 200
        assert other.post("/v1/completions", body | {"prompt": "a"}).status_code == 200
        ids = {"token_ids": [5], "sampling_params": body}
        assert other.post("/inference/v1/generate", ids).status_code == 200
        thinking = {"type": "enabled", "budget_tokens": 3}
        body = {"messages": MESSAGES, "max_tokens": 5, "thinking": thinking}
        assert other.post("/v1/messages", body).status_code == 200
    assert len([line for line in caplog.messages if line.startswith("thinking_token_budget is ignored")]) == 1
