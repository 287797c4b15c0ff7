"""From a constraint to the grammar that the compiler reads: llguidance's JSON, or Lark in its dialect.

Called in a helper process only, since constraints are untrusted. Does not compile.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llguidance import regex_to_lark

from quire.structured_output.constraint import Constraint
from quire.structured_output.json_schema import prepare_schema
from quire.structured_output.lark_text import quoted

_ANY_OBJECT = '{"type": "object"}'


def grammar_of(constraint: Constraint) -> str:
    """The grammar of a constraint.

    Raises:
        ValueError: It cannot be honoured; the message says what to do.
    """
    return _TRANSLATIONS[constraint.kind](constraint)


def _json(constraint: Constraint) -> str:
    return json.dumps({"grammars": [{"json_schema": _schema(constraint.text, constraint)}]})


def _json_object(constraint: Constraint) -> str:
    return json.dumps({"grammars": [{"json_schema": _schema(_ANY_OBJECT, constraint)}]})


def _regex(constraint: Constraint) -> str:
    return f"start: /{regex_to_lark(constraint.text, use_ascii='')}/"


def _choice(constraint: Constraint) -> str:
    return "start: CHOICE\nCHOICE: " + " | ".join(quoted(text) for text in json.loads(constraint.text))


def _grammar(constraint: Constraint) -> str:
    if "::=" in constraint.text:
        raise ValueError("EBNF is not supported yet: write the grammar in Lark's syntax")
    return constraint.text


def _structural_tag(constraint: Constraint) -> str:
    raise ValueError("structural tags are not supported yet: leave them out")


def _schema(text: str, constraint: Constraint) -> dict[str, Any]:
    return prepare_schema(
        text,
        whitespace=constraint.whitespace,
        any_whitespace=constraint.any_whitespace,
        closed=constraint.closed,
    )


_TRANSLATIONS: dict[str, Callable[[Constraint], str]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
