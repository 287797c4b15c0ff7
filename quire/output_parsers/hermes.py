"""Calls as JSON objects between `<tool_call>` and `</tool_call>`: Hermes 2 Pro and 3, Qwen2.5, Qwen3 and others.

Source: the function calling format in the model card of NousResearch/Hermes-2-Pro-Llama-3-8B, and Qwen2.5's template.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.output_parsers.answer_text import AnswerText
from quire.output_parsers.events import Tool
from quire.output_parsers.formats import ToolFormat
from quire.output_parsers.scanner import Steps, Tags, TextScanner
from quire.output_parsers.tool_calls import JsonCall, ToolCalls

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OPEN, _EITHER = Tags(OPEN), Tags(OPEN, CLOSE)


def read(scanner: TextScanner, tools: Sequence[Tool]) -> Steps[None]:
    """Content and calls."""
    answer = AnswerText()
    calls = ToolCalls(answer)
    called = False  # then a closing tag is expected, and is no content
    while tag := (yield from scanner.until(_EITHER if called else _OPEN, answer.text)):
        called = tag == OPEN and (yield from _read_objects(scanner, answer, calls))
    yield from answer.finish()


def _read_objects(scanner: TextScanner, answer: AnswerText, calls: ToolCalls) -> Steps[bool]:
    """What stands behind an opening tag: one object, though some models write several. False if there is no call."""
    called = False
    scanner.start_recording(OPEN)
    while (yield from scanner.skip_space()) == "{":
        if not (yield from JsonCall(scanner, calls, closing=_EITHER).read()):
            break
        called = True
        scanner.start_recording()
    else:
        if called:
            scanner.recorded()
            return True
    yield from answer.text(scanner.recorded())
    return called


FORMAT = ToolFormat(read, special_tokens=(OPEN, CLOSE))
