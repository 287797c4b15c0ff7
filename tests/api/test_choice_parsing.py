"""A parsed choice: its events, its end, and its chunks in OpenAI's types."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import openai.types.chat as openai_chat
import pytest

from quire.serving.api.chat_parsers import ChoiceParser, OutputParsing
from quire.serving.api.chat_serializer import ChatSerializer
from quire.serving.api.token_fields import PromptFields, TokenNames
from quire.text.deltas import ChoiceDelta, FinishReason
from quire.text.output_parsers.events import ContentDelta, ReasoningDelta, ToolCallDelta, ToolCallStart, merge_events
from quire.text.output_parsers.registry import create_parser

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
HEAD = {"id": "chatcmpl-1", "created": 1, "model": "m"}


def parsed(text: str, end: FinishReason = "stop", *, step: int = 1000, one_call: bool = False) -> ChoiceDelta:
    """The whole choice, of pieces of `step` characters."""
    parser = ChoiceParser(OutputParsing(lambda: create_parser("hermes", "qwen3"), one_call=one_call))
    whole = ChoiceDelta()
    for start in range(0, len(text), step):
        gained = ChoiceDelta(text[start : start + step], finish_reason=end if start + step >= len(text) else None)
        parser.parse(gained)
        whole.add(gained)
        if gained.finish_reason:
            break
    return whole


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_choice_that_stops_behind_a_call_ends_by_tool_calls(step: int) -> None:
    whole = parsed(CALL, step=step)
    start, arguments = merge_events(whole.output)
    assert isinstance(start, ToolCallStart)
    assert (start.index, start.name, arguments) == (0, "f", ToolCallDelta(0, '{"x": 1}'))
    assert re.fullmatch(r"call_[0-9a-f]{24}", start.id or "")
    assert whole.finish_reason == "tool_calls"


def test_other_ends_stay_as_they_are() -> None:
    assert parsed("hello").finish_reason == "stop"
    assert parsed(CALL, "length").finish_reason == "length"


@pytest.mark.parametrize("step", [1, 1000])
def test_one_call_ends_the_choice(step: int) -> None:
    two = CALL + "\n" + CALL.replace("f", "g") + "more"
    assert [event.name for event in parsed(two).output if isinstance(event, ToolCallStart)] == ["f", "g"]
    one = parsed(two, "length", step=step, one_call=True)
    assert [event.name for event in one.output if isinstance(event, ToolCallStart)] == ["f"]
    assert one.finish_reason == "tool_calls"


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("end", ["", "\n</think>", "\n</think>\n\n"])
def test_a_call_within_the_reasoning_is_not_lost_if_nothing_follows(step: int, end: str) -> None:
    whole = parsed(f"<think>\nI will call it.\n{CALL}{end}", step=step)
    thought, *rest = merge_events(whole.output)
    assert isinstance(thought, ReasoningDelta)
    assert thought.text.startswith("I will call it.\n<tool_call>")
    calls = [event for event in rest if not isinstance(event, ContentDelta) or event.text.strip()]
    assert [type(event) for event in calls] == [ToolCallStart, ToolCallDelta]
    assert whole.finish_reason == "tool_calls"


@pytest.mark.parametrize("step", [1, 1000])
def test_what_reasoning_only_considers_is_no_call(step: int) -> None:
    for end, finish in (
        ("</think>No need.", "stop"),
        ("", "length"),
        (f"</think>{CALL.replace('f', 'g')}", "tool_calls"),
    ):
        whole = parsed(f"<think>Shall I? {CALL}{end}", "length" if finish == "length" else "stop", step=step)
        names = [event.name for event in whole.output if isinstance(event, ToolCallStart)]
        assert (names, whole.finish_reason) == (["g"] if finish == "tool_calls" else [], finish)


@pytest.mark.parametrize("step", [1, 1000])
def test_a_broken_call_within_the_reasoning_is_text(step: int) -> None:
    broken = '<tool_call>\n{"name": "f", "argum'
    whole = parsed(f"<think>Now. {broken}", step=step)
    assert merge_events(whole.output) == [ReasoningDelta(f"Now. {broken}"), ContentDelta(broken)]
    assert whole.finish_reason == "stop"


def test_without_a_parser_all_text_is_content() -> None:
    assert list(ChoiceDelta("a").output) == [ContentDelta("a")]
    assert list(ChoiceDelta().output) == []


def serializer(**options: Any) -> ChatSerializer:
    return ChatSerializer(TokenNames(None), None, "assistant", PromptFields([[1]], 1, None), **options)


@pytest.mark.parametrize("step", [1, 1000])
def test_chunks_and_message_are_openais(step: int) -> None:
    text = f"<think>\nhm\n</think>\n\nok\n{CALL}"
    parser = ChoiceParser(OutputParsing(lambda: create_parser("hermes", "qwen3")))
    shown = serializer(may_call=True)
    choices = [(shown.first_chunk(0) or {})["choices"][0]]
    for start in range(0, len(text), step):
        end = "stop" if start + step >= len(text) else None
        gained = ChoiceDelta(text[start : start + step], finish_reason=end)
        parser.parse(gained)
        choices += shown.chunks(0, gained)
        if end:
            choices.append(shown.last_chunk(0, gained))
    chunks = [
        openai_chat.ChatCompletionChunk.model_validate(
            {**HEAD, "object": "chat.completion.chunk", "choices": [choice]}, strict=True
        )
        for choice in choices
    ]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert [call.id is not None for call in calls] == [True] + [False] * (len(calls) - 1)
    assert [call.type for call in calls] == ["function"] + [None] * (len(calls) - 1)
    assert [call.function.name for call in calls if call.function and call.function.name] == ["f"]
    assert "".join(call.function.arguments or "" for call in calls if call.function) == '{"x": 1}'
    assert "".join(delta.content or "" for delta in deltas).strip() == "ok"
    assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == "hm"
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "hm"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]
    assert choices[-1]["delta"] == {}


def test_a_whole_message() -> None:
    def message(text: str, **options: Any) -> dict[str, Any]:
        body = asyncio.run(serializer(**options).body([parsed(text)]))
        whole = {**HEAD, "object": "chat.completion", **body}
        openai_chat.ChatCompletion.model_validate(whole, strict=True)
        found: dict[str, Any] = body["choices"][0]["message"]
        return found

    called = message(f"<think>\nhm\n</think>\n\n{CALL}")
    (call,) = called.pop("tool_calls")
    assert called == {"role": "assistant", "content": None, "reasoning": "hm", "reasoning_content": "hm"}
    assert call == {"id": call["id"], "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert message("<think>hm</think>a", reasoning=False) == {"role": "assistant", "content": "a"}
    assert message("a") == {"role": "assistant", "content": "a"}
