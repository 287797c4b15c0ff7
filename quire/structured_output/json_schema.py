"""JSON schemas as the grammar compiler takes them; what it would not enforce is refused by name.

The compiler refuses most keywords that it does not know; this module adds those that it would pass over. Schemas of
older drafts are brought to the form of 2020-12 where that is a matter of spelling.
"""

from __future__ import annotations

import json
from typing import Any

from quire.structured_output.constraint import Constraint

MAX_DEPTH = 64
"""Schemas inside each other."""
WHITESPACE = r"(\n[ ]{0,24}|[ ])?"
"""Between the parts of JSON where nothing else was asked for: enough for any usual indentation. Without a bound, a
model can go on with spaces for ever."""

REFUSED = frozenset({
    "$dynamicAnchor",
    "$dynamicRef",
    "$recursiveAnchor",
    "$recursiveRef",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "disallow",
    "divisibleBy",
    "else",
    "extends",
    "if",
    "maxContains",
    "minContains",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
})  # fmt: skip
"""Keywords that restrict what is valid and cannot be enforced token by token here."""

_NEUTRAL: tuple[tuple[str, Any], ...] = (
    ("uniqueItems", False),
    ("minContains", 0),
    ("unevaluatedItems", True),
    ("unevaluatedProperties", True),
    ("propertyNames", True),
    ("dependencies", {}),
    ("dependentRequired", {}),
    ("dependentSchemas", {}),
)
"""Refused keywords with the value that restricts nothing: generators of schemas write these."""
_ANY_OBJECT = '{"type": "object"}'
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("additionalProperties", "items", "additionalItems")


class SchemaRefused(ValueError):
    """The schema cannot be honoured in full; the message names the keyword and where it stands."""


def json_schema_of(constraint: Constraint, text: str | None = None) -> dict[str, Any] | None:
    """The schema that a constraint asks for, for the compiler; None if it does not ask for JSON.

    Args:
        text: A schema within the constraint, instead of its own.

    Raises:
        SchemaRefused: See there.
    """
    if text is None:
        if constraint.kind not in ("json", "json_object"):
            return None
        text = constraint.text if constraint.kind == "json" else _ANY_OBJECT
    return prepare_schema(
        text,
        whitespace=constraint.whitespace,
        any_whitespace=constraint.any_whitespace,
        closed=constraint.closed,
    )


def prepare_schema(
    text: str, *, whitespace: str | None = None, any_whitespace: bool = True, closed: bool = False
) -> dict[str, Any]:
    """A schema for the compiler.

    Args:
        text: JSON; an object or a boolean.
        whitespace: A regular expression for the whitespace between parts; None for WHITESPACE.
        any_whitespace: Whether there may be whitespace between parts at all.
        closed: Objects that do not speak of additional properties have none.

    Raises:
        SchemaRefused: See there.
    """
    schema = json.loads(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise SchemaRefused("the schema allows nothing")
    schema = _prepare(schema, "", closed, 0)
    options: dict[str, Any] = {"whitespace_flexible": False}
    if any_whitespace:
        options = {"whitespace_pattern": WHITESPACE if whitespace is None else whitespace}
    return {**schema, "x-guidance": options}  # takes the place of one that the client may have sent


def _prepare(schema: Any, place: str, closed: bool, depth: int) -> Any:
    """A copy of a schema and all schemas in it."""
    if not isinstance(schema, dict):
        return schema
    if depth > MAX_DEPTH:
        raise SchemaRefused(f"schemas are nested more than {MAX_DEPTH} deep")
    schema = _modern(schema)
    for keyword in schema.keys() & REFUSED:
        raise SchemaRefused(f"keyword '{keyword}' is not supported{_at(place)}: leave it out")
    prepared = {
        keyword: _prepare_keyword(keyword, value, f"{place}/{keyword}", closed, depth)
        for keyword, value in schema.items()
    }
    if closed and "properties" in prepared:
        prepared.setdefault("additionalProperties", False)
    return prepared


def _prepare_keyword(keyword: str, value: Any, place: str, closed: bool, depth: int) -> Any:
    if keyword in _MAPS and isinstance(value, dict):
        return {name: _prepare(each, f"{place}/{name}", closed, depth + 1) for name, each in value.items()}
    if isinstance(value, list) and keyword in (*_LISTS, "items"):
        return [_prepare(each, f"{place}/{number}", closed, depth + 1) for number, each in enumerate(value)]
    if keyword in _SINGLE:
        return _prepare(value, place, closed, depth + 1)
    return value


def _modern(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without keywords that say nothing, and with draft 4's exclusive bounds as numbers."""
    schema = {keyword: value for keyword, value in schema.items() if (keyword, value) not in _NEUTRAL}
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if schema.get(exclusive) is True and bound in schema:
            schema[exclusive] = schema.pop(bound)
        elif isinstance(schema.get(exclusive), bool):
            del schema[exclusive]
    return schema


def _at(place: str) -> str:
    return f" (at {place[:120]})" if place else ""
