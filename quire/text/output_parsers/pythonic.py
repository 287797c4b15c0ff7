"""Calls as Python writes them, in a list, `[get_weather(city="Paris"), get_time()]`, or in lines of their own.

Since no token marks a list (Llama 4's tags may be missing), it is one of calls only if it begins with the name of a
tool; lines stand between tags. Each call comes out when it is complete, because only then its values are known.

Sources: the prompt formats of Llama 3.2 and Llama 4 in meta-llama/llama-models, and vLLM's templates for both; the chat
templates of LiquidAI/LFM2-1.2B and allenai/Olmo-3-7B-Instruct.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from quire.text.output_parsers.events import Tool
from quire.text.output_parsers.formats import CallSyntax, KeyedArguments, ToolFormat
from quire.text.output_parsers.scanner import Steps, Tags, TextScanner
from quire.text.output_parsers.tool_calls import Answer, read_unmarked_calls

_LLAMA_4 = ("<|python_start|>", "<|python_end|>")
_LFM_2 = ("<|tool_call_start|>", "<|tool_call_end|>")
_OLMO_3 = ("<function_calls>", "</function_calls>")
_NAME_END = Tags("(", ")", "[", "]", "\n", '"', "'", ",", "{")
_NAME = re.compile(r"[^\W\d][\w.\-]*")
_CONSTANTS = {"true": True, "false": False, "null": None}


def _list_format(start: str, end: str, syntax: CallSyntax) -> ToolFormat:
    """A list, between tags that may be missing."""
    ends = Tags(end)

    def read_list(scanner: TextScanner, answer: Answer, names: Collection[str] | None) -> Steps[bool]:
        return (yield from _list(scanner, answer, names, ends))

    def read(scanner: TextScanner, answer: Answer, tools: Sequence[Tool]) -> Steps[None]:
        yield from read_unmarked_calls(scanner, answer, tools, start, read_list)

    return ToolFormat(read, (start, end), (syntax,))


def _line_format(start: str, end: str, syntax: CallSyntax) -> ToolFormat:
    """A line for each call, between tags."""
    starts, ends = Tags(start), Tags(end)

    def read(scanner: TextScanner, answer: Answer, tools: Sequence[Tool]) -> Steps[None]:
        while (yield from scanner.until(starts, answer.text)):
            scanner.start_recording(start)
            while (yield from scanner.skip_space()) not in ("", "<") and (call := (yield from _call(scanner, None))):
                scanner.recorded()
                yield from answer.whole(*call)
                scanner.start_recording()
            yield from scanner.skip_tag(ends)
            skipped = scanner.recorded()
            if skipped.strip() not in ("", end):
                yield from answer.text(skipped)

    return ToolFormat(read, (start, end), (syntax,))


def _list(scanner: TextScanner, answer: Answer, names: Collection[str] | None, ends: Tags) -> Steps[bool]:
    called = False
    if (yield from scanner.skip_space()) == "[":
        scanner.take()
        while call := (yield from _call(scanner, names)):
            scanner.recorded()
            yield from answer.whole(*call)
            called = True
            scanner.start_recording()
            separator = yield from scanner.skip_space()
            if separator in (",", "]"):
                scanner.take()
            if separator != ",":
                yield from scanner.skip_space()
                yield from scanner.skip_tag(ends)
                scanner.start_recording()  # white space and tags are no content
                break
    return called


def _call(scanner: TextScanner, names: Collection[str] | None) -> Steps[tuple[str, str] | None]:
    """The name and the arguments, as JSON, of the call that begins here."""
    yield from scanner.skip_space()
    name, tag = yield from scanner.text_until(_NAME_END, consume=False)
    name = name.strip()
    if tag != "(" or not _NAME.fullmatch(name) or (names is not None and name not in names):
        return None
    arguments = yield from scanner.python_brackets()
    converted = arguments and _json_arguments(arguments)
    return (name, converted) if converted else None


def _json_arguments(text: str) -> str | None:
    """The keyword arguments in these brackets as a JSON object; None if they are not literals."""
    try:
        call = ast.parse("f" + text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        lines = ("f" + text).encode().split(b"\n")
        values = {keyword.arg: _json_value(lines, keyword.value) for keyword in call.keywords}
        return None if None in values else json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _json_value(lines: list[bytes], node: ast.expr) -> Any:
    """A value: JSON where it is any, since both languages escape differently; else Python."""
    if node.lineno == node.end_lineno:
        try:
            return json.loads(lines[node.lineno - 1][node.col_offset : node.end_col_offset])
        except ValueError:
            pass
    return _value(node)


def _value(node: ast.expr) -> Any:
    """A literal's value; JSON's words are understood as well."""
    match node:
        case ast.Name(id) if id in _CONSTANTS:
            return _CONSTANTS[id]
        case ast.List(elts) | ast.Tuple(elts):
            return [_value(element) for element in elts]
        case ast.Dict(keys, values):
            if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys):
                raise ValueError("a key is no string")
            return {ast.literal_eval(key): _value(value) for key, value in zip(keys, values, strict=True) if key}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("not JSON")
    return value


_KEYED = KeyedArguments("", "=", "", separator=", ")
FORMAT = _list_format(*_LLAMA_4, CallSyntax("", "(", ")", begin="[", separator=", ", end="]", keyed=_KEYED))
LFM2 = _list_format(
    *_LFM_2,
    CallSyntax(
        "", "(", ")", trigger=_LFM_2[0], begin=_LFM_2[0] + "[", separator=", ", end="]" + _LFM_2[1], keyed=_KEYED
    ),
)
OLMO3 = _line_format(
    *_OLMO_3,
    CallSyntax(
        "", "(", ")", trigger=_OLMO_3[0], begin=_OLMO_3[0] + "\n", separator="\n", end="\n" + _OLMO_3[1], keyed=_KEYED
    ),
)
