"""GLM's calls: a name, then pairs of `<arg_key>` and `<arg_value>`.

Source: the chat templates of zai-org/GLM-4.5 and GLM-4.7, which differ in their newlines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.text.output_parsers.argument_types import ArgumentTypes, TypedArguments
from quire.text.output_parsers.events import Tool
from quire.text.output_parsers.formats import CallSyntax, KeyedArguments, ToolFormat
from quire.text.output_parsers.scanner import Steps, Tags, TextScanner
from quire.text.output_parsers.tool_calls import Answer

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_OPEN, _EITHER = Tags(OPEN), Tags(OPEN, CLOSE)
_AFTER_NAME = Tags("\n", KEY, OPEN, CLOSE)
_INSIDE = Tags(KEY, OPEN, CLOSE)
_KEY_END = Tags(KEY_END, KEY, VALUE, OPEN, CLOSE)
_VALUE = Tags(VALUE)
_VALUE_END = Tags(VALUE_END, CLOSE)
_NAME = re.compile(r"\s*([^\s<>{}\[\]\"']+)\s*")


def read(scanner: TextScanner, answer: Answer, tools: Sequence[Tool]) -> Steps[None]:
    called = False  # then a closing tag is expected, and is no content
    while tag := (yield from scanner.until(_EITHER if called else _OPEN, answer.text)):
        called = tag == OPEN and (yield from _call(scanner, answer, tools))


def _call(scanner: TextScanner, answer: Answer, tools: Sequence[Tool]) -> Steps[bool]:
    """Read a call behind the opening tag; False if there is none, and it became content."""
    scanner.start_recording(OPEN)
    yield from scanner.skip_space()
    text, tag = yield from scanner.text_until(_AFTER_NAME, consume=False)
    recorded, name = scanner.recorded(), _NAME.fullmatch(text)
    if name is None or tag is None or tag == OPEN:
        yield from answer.text(recorded)
        return False
    yield from answer.start(name[1])
    arguments = TypedArguments(scanner, answer, ArgumentTypes(tools, name[1]))
    while tag := (yield from scanner.until(_INSIDE, answer.text, consume=False)):
        if tag != KEY:
            yield from arguments.close()
            return True
        yield from _argument(scanner, answer, arguments)
    return True


def _argument(scanner: TextScanner, answer: Answer, arguments: TypedArguments) -> Steps[None]:
    """Read one key and its value; a key without a value is content."""
    scanner.start_recording()
    yield from scanner.skip_tag(_INSIDE)
    key, tag = yield from scanner.text_until(_KEY_END, consume=False)
    if tag == KEY_END:
        yield from scanner.skip_tag(_KEY_END)
        yield from scanner.skip_space()
        tag = yield from scanner.skip_tag(_VALUE)
    recorded = scanner.recorded()
    if tag != VALUE or not recorded.endswith(VALUE):
        yield from answer.text(recorded)
    elif (yield from arguments.read(key.strip(), _VALUE_END)) == VALUE_END:
        yield from scanner.skip_tag(_VALUE_END)


def _format(newline: str) -> ToolFormat:
    return ToolFormat(
        read,
        special_tokens=(OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END),
        syntaxes=(
            CallSyntax(
                OPEN,
                newline,
                CLOSE,
                trigger=OPEN,
                separator=newline,
                keyed=KeyedArguments(
                    KEY, f"{KEY_END}{newline}{VALUE}", VALUE_END + newline, text_end=VALUE_END, never_in_text=(CLOSE,)
                ),
            ),
        ),
    )


GLM45 = _format("\n")
GLM47 = _format("")
