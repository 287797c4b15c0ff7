"""Mistral's calls behind `[TOOL_CALLS]`: a JSON list, or, since tokenizer v11, a name and its arguments each.

Sources: mistral-common's instruct tokenizers V3, V7, V11 and V13 (`tokens/tokenizers/instruct.py`), and its request
validator, which wants ids of nine letters and digits.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Sequence

from quire.text.output_parsers.events import Tool
from quire.text.output_parsers.formats import CallSyntax, ToolFormat
from quire.text.output_parsers.scanner import Steps, Tags, TextScanner
from quire.text.output_parsers.tagged_json import read_objects
from quire.text.output_parsers.tool_calls import Answer

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_CALLS = Tags(CALLS)
_AFTER_NAME = Tags(CALL_ID, ARGS, "{", CALLS)
_AFTER_ID = Tags(ARGS, "{", CALLS)
_NAME = re.compile(r"\s*([\w.-]+)\s*", re.ASCII)
_ID = re.compile(r"\s*([a-zA-Z0-9]{9})\s*")


def new_call_id() -> str:
    """An id that Mistral's templates accept."""
    return "".join(random.choices(string.ascii_letters + string.digits, k=9))


def read(scanner: TextScanner, answer: Answer, tools: Sequence[Tool]) -> Steps[None]:
    while (yield from scanner.until(_CALLS, answer.text)):
        scanner.start_recording(CALLS)
        first = yield from scanner.skip_space()
        tag = scanner.recorded()
        if first in ("[", "{"):
            yield from read_objects(scanner, answer, tag, _CALLS)
        else:
            yield from _named_call(scanner, answer, tag)


def _named_call(scanner: TextScanner, answer: Answer, tag_before: str) -> Steps[None]:
    """`name{…}`, `name[ARGS]{…}` or `name[CALL_ID]id[ARGS]{…}`."""
    scanner.start_recording(tag_before)
    text, tag = yield from scanner.text_until(_AFTER_NAME, consume=False)
    name, call_id = _NAME.fullmatch(text), None
    if name and tag == CALL_ID:
        yield from scanner.skip_tag(_AFTER_NAME)
        text, tag = yield from scanner.text_until(_AFTER_ID, consume=False)
        call_id = _ID.fullmatch(text)
    if name and tag == ARGS:
        yield from scanner.skip_tag(_AFTER_NAME)
        tag = yield from scanner.skip_space()
    recorded = scanner.recorded()
    if name is None or tag != "{":
        yield from answer.text(recorded)
        return
    yield from answer.start(name[1], call_id[1] if call_id else None)
    yield from scanner.json_container(_CALLS, answer.arguments)


FORMAT = ToolFormat(
    read,
    special_tokens=(CALLS, CALL_ID, ARGS),
    new_id=new_call_id,
    syntaxes=(
        CallSyntax(CALLS, ARGS, "", trigger=CALLS, only_with=ARGS),
        CallSyntax('{"name": "', '", "arguments": ', "}", trigger=CALLS, begin=CALLS + " [", separator=", ", end="]"),
    ),
)
