"""Whatever a model writes, no parser raises, loses text or takes more than linear time."""

from __future__ import annotations

import gc
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.output_parsers.events import ContentDelta, OutputEvent, ReasoningDelta, Tool, merge_events
from quire.text.output_parsers.formats import Turn
from quire.text.output_parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    create_parser,
    reasoning_format,
    special_tokens,
    tool_format,
)

TOOLS = (Tool("f", {"type": "object", "properties": {"s": {"type": "string"}, "i": {"type": "integer"}}}),)
PAIRS = [(name, None) for name in TOOL_PARSERS] + [(None, name) for name in REASONING_PARSERS] + [
    ("hermes", "qwen3"), ("openai", "openai_gptoss"), ("mistral", "mistral"), ("kimi_k2", "kimi_k2"),
]  # fmt: skip
JSON_PIECES = [
    "```json\n",
    "<tools>",
    '{"name": "f", "arguments": {"s": "x"}}',
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ":",
    ",",
    ";",
    "\n",
    " ",
    "f",
    "1",
]
XML_PIECES = ["<function=f>", "</function>", "<parameter=s>", "<parameter=i>", "</parameter>", '<invoke name="', '">',
              "f(s='x')", "<", ">", "functions.f:0", "function", " to=functions.f", "analysis", "é🙂"]  # fmt: skip


def events_of(pieces: list[str], tool: str | None, reasoning: str | None) -> list[OutputEvent]:
    """All events, ids left out: Mistral's are random."""
    parser = create_parser(tool, reasoning, tools=TOOLS)
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish()
    for event in events:
        if hasattr(event, "id") and tool == "mistral":
            object.__setattr__(event, "id", None)
    return merge_events(events)


def tags_of(tool: str | None, reasoning: str | None) -> list[str]:
    return sorted(special_tokens(tool, reasoning))


@pytest.mark.parametrize(("tool", "reasoning"), PAIRS)
@settings(max_examples=60)
@given(data=st.data())
def test_pieces_of_the_format_in_any_order_are_read_the_same_in_one_go_and_by_characters(
    tool: str | None, reasoning: str | None, data: st.DataObject
) -> None:
    piece = st.sampled_from([*tags_of(tool, reasoning), *JSON_PIECES, *XML_PIECES])
    text = "".join(data.draw(st.lists(piece, max_size=14)))
    assert events_of(list(text), tool, reasoning) == events_of([text], tool, reasoning)


@pytest.mark.parametrize(("tool", "reasoning"), PAIRS)
@settings(max_examples=25)
@given(text=st.text(alphabet="abc <>{}[]\"'\\\n:,|/=_é🙂"))
def test_text_without_the_formats_tags_comes_out_as_it_is(tool: str | None, reasoning: str | None, text: str) -> None:
    if reasoning and reasoning_format(reasoning).opened(Turn()):  # their outputs begin with reasoning
        return
    assert events_of([text], tool, reasoning) == ([ContentDelta(text)] if text else [])


@pytest.mark.parametrize(("tool", "reasoning"), PAIRS)
def test_the_time_is_linear_in_the_text(tool: str | None, reasoning: str | None) -> None:
    """Texts that are held back, fail late or are all white space: four times as many characters, about four times the
    time; where it was quadratic, sixteen times."""

    def seconds(unit: str, length: int) -> float:
        text = (unit * length)[:length]
        started = time.process_time()
        events_of([text], tool, reasoning)
        events_of([text[at : at + 7] for at in range(0, length, 7)], tool, reasoning)
        return time.process_time() - started

    def takes_four_times(unit: str) -> bool:
        """With room for what disturbs; the short text is needed only where the long one takes long."""
        long = seconds(unit, 40_000)
        return long < 0.02 or long < 9 * min(seconds(unit, 10_000) for _ in range(3)) + 0.02

    gc.disable()  # its time grows with all that other tests have left
    try:
        for unit in [
            *tags_of(tool, reasoning),
            '{"name": "f',
            '[f(s="',
            '\n{"name": "f',
            "\n```json\n",
            "<function=f",
            "\n",
            " ",
            '{"a": [',
            "\\",
            "a",
        ]:
            assert any(takes_four_times(unit) for _ in range(3)), unit
    finally:
        gc.enable()


def test_every_name_has_a_format() -> None:
    for name in TOOL_PARSERS:
        assert tool_format(name).special_tokens
    for name in REASONING_PARSERS:
        assert reasoning_format(name).end


def test_json_that_is_no_call_is_held_back_no_longer_than_needed() -> None:
    def said(text: str) -> str:
        events = create_parser("hermes", None, tools=TOOLS).feed(text)
        return "".join(event.text for event in events if isinstance(event, ContentDelta))

    for text in ('{"n"', '{"name": "g"', '{"name": "f", "a"', "[1", "```json\n[1", "```p", "a\n{", "a\nb", '{"f": {'):
        expected = text[: text.index("\n") + 1] if text == "a\n{" else text
        assert said(text) == expected, text
    for text in ('{"name": "f", "arguments"', "```json\n{", "["):
        assert said(text) == "", text


def test_reasoning_alone_is_no_content() -> None:
    assert events_of(["a"], None, "deepseek_r1") == [ReasoningDelta("a")]


def test_arguments_of_a_well_formed_call_are_json() -> None:
    [_, arguments] = events_of(['<tool_call>{"name": "f", "arguments": {"s": "\\u00e9"}}</tool_call>'], "hermes", None)
    assert json.loads(getattr(arguments, "arguments", "")) == {"s": "é"}
