"""Llama's calls: JSON objects without tags, at the beginning of a line.

Since nothing marks them, an object is a call only if it names one of the tools; any other is content.

Sources: the prompt formats of Llama 3.1 and 3.2 in meta-llama/llama-models (models/llama3_1/prompt_format.md), and
vLLM's documentation of `llama3_json`, which separates several calls by semicolons.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from quire.output_parsers.answer_text import AnswerText
from quire.output_parsers.events import Tool
from quire.output_parsers.formats import CallSyntax, ToolFormat
from quire.output_parsers.scanner import Steps, Tags, TextScanner
from quire.output_parsers.tool_calls import JsonCall, ToolCalls

PYTHON_TAG = "<|python_tag|>"
_LINE_START = Tags("\n", PYTHON_TAG)
_SEPARATORS = Tags(";", ",")
_PYTHON_TAG = Tags(PYTHON_TAG)


def read(scanner: TextScanner, tools: Sequence[Tool]) -> Steps[None]:
    """Content and calls."""
    answer = AnswerText()
    calls = ToolCalls(answer)
    names = {tool.name for tool in tools} or None
    before: str | None = ""
    while before is not None:
        called = yield from _objects(scanner, answer, calls, names, before)
        before = yield from scanner.until(_LINE_START, answer.text)
        if before == "\n" and not called:
            yield from answer.text(before)
            before = ""
    yield from answer.finish()


def _objects(
    scanner: TextScanner, answer: AnswerText, calls: ToolCalls, names: Collection[str] | None, before: str
) -> Steps[bool]:
    """Calls that begin here, after each other; what is none becomes content, with `before`."""
    called = False
    scanner.start_recording(before)
    yield from scanner.skip_space()
    yield from scanner.skip_tag(_PYTHON_TAG)
    while (yield from scanner.skip_space()) == "{":
        if not (yield from JsonCall(scanner, calls, closing=_PYTHON_TAG, names=names).read()):
            break
        called = True
        scanner.start_recording()
        yield from scanner.skip_space()
        yield from scanner.skip_tag(_SEPARATORS)
    yield from answer.text(scanner.recorded())
    return called


FORMAT = ToolFormat(
    read,
    special_tokens=(PYTHON_TAG,),
    syntaxes=(CallSyntax('{"name": "', '", "parameters": ', "}", separator="; ", arguments_key="parameters"),),
)
