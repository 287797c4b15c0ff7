"""Llama's calls: JSON objects without tags, at the beginning of a line.

Since nothing marks them, an object is a call only if it names one of the tools; any other is content.

Sources: the prompt formats of Llama 3.1 and 3.2 in meta-llama/llama-models (models/llama3_1/prompt_format.md), and
vLLM's documentation of `llama3_json`, which separates several calls by semicolons.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from quire.text.output_parsers.events import Tool
from quire.text.output_parsers.formats import CallSyntax, ToolFormat
from quire.text.output_parsers.scanner import Steps, Tags, TextScanner
from quire.text.output_parsers.tool_calls import Answer, JsonCall, read_unmarked_calls

PYTHON_TAG = "<|python_tag|>"
_SEPARATORS = Tags(";", ",")
_PYTHON_TAG = Tags(PYTHON_TAG)


def read(scanner: TextScanner, answer: Answer, tools: Sequence[Tool]) -> Steps[None]:
    yield from read_unmarked_calls(scanner, answer, tools, PYTHON_TAG, _objects)


def _objects(scanner: TextScanner, answer: Answer, names: Collection[str] | None) -> Steps[bool]:
    called = False
    while (yield from scanner.skip_space()) == "{":
        if not (yield from JsonCall(scanner, answer, closing=_PYTHON_TAG, names=names).read()):
            break
        called = True
        scanner.start_recording()
        yield from scanner.skip_space()
        yield from scanner.skip_tag(_SEPARATORS)
    return called


FORMAT = ToolFormat(
    read,
    special_tokens=(PYTHON_TAG,),
    syntaxes=(CallSyntax('{"name": "', '", "parameters": ', "}", separator="; ", arguments_key="parameters"),),
)
