"""Schemas of everyday sizes and of combinations that the test suite of JSON Schema has few of; all are bounded."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _closed(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(longest: int = 12, **more: Any) -> Schema:
    return {"type": "string", "maxLength": longest, **more}


def _list(items: Schema, longest: int = 3, **more: Any) -> Schema:
    return {"type": "array", "items": items, "maxItems": longest, **more}


FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
PATTERNS = (
    "^[a-z]{2,8}$", "^\\d{3}-\\d{4}$", "^(red|green|blue)$", "^[A-Z][a-z]*$", "^#[0-9a-fA-F]{6}$", "^\\S{1,9}$",
    "a.c", "^v\\d+\\.\\d+\\.\\d+$", "^[^\"\\\\]{0,6}$", "^(a|b)?c+$",
)  # fmt: skip
NUMBERS: tuple[Schema, ...] = (
    {"minimum": 0}, {"maximum": -3}, {"minimum": 5, "maximum": 5}, {"minimum": -7, "maximum": 1234},
    {"exclusiveMinimum": 0, "exclusiveMaximum": 3}, {"minimum": 0, "exclusiveMaximum": 1000}, {"multipleOf": 7},
    {"multipleOf": 5, "minimum": 10, "maximum": 200},
)  # fmt: skip
FLOATS: tuple[Schema, ...] = (
    {"minimum": 0.5, "maximum": 2.25},
    {"exclusiveMinimum": -1, "maximum": 1},
    {"minimum": 1e3},
)
_PERSON = _closed(
    name=_text(20, minLength=1),
    age={"type": "integer", "minimum": 0, "maximum": 130},
    email=_text(40, format="email"),
    tags=_list({"enum": ["new", "old", "loyal"]}),
    address=_closed(street=_text(20), zip={"type": "string", "pattern": "^[0-9]{5}$"}, home={"type": "boolean"}),
)
_TREE: Schema = {
    "$ref": "#/$defs/node",
    "$defs": {"node": _closed(value={"type": "integer"}, children=_list({"$ref": "#/$defs/leaf"}, 2)),
              "leaf": _closed(value={"type": ["integer", "null"]})},
}  # fmt: skip

OWN_SCHEMAS: list[Schema] = [
    *({"type": "string", "format": name, "maxLength": 60} for name in FORMATS),
    *({"type": "string", "pattern": pattern, "maxLength": 16} for pattern in PATTERNS),
    *({"type": "integer", **bounds} for bounds in NUMBERS),
    *({"type": "number", **bounds} for bounds in FLOATS),
    *({"type": "string", "minLength": low, "maxLength": high} for low, high in ((0, 0), (3, 3), (1, 40), (10, 20))),
    *(_list({"type": "boolean"}, high, minItems=low) for low, high in ((0, 0), (2, 2), (1, 6))),
    _list(_list({"type": "integer", "maximum": 9, "minimum": 0})),
    {"type": "array", "prefixItems": [{"type": "integer"}, _text()], "items": False, "minItems": 2},
    {"type": "array", "items": [{"type": "null"}, _text()], "additionalItems": False},
    {"type": ["string", "null"], "maxLength": 5},
    {"enum": ["a", 1, None, True, [1, {"b": 2}], 'quote"d', "ü\n"]},
    {"const": {"a": [1, "x"], "b": None}},
    {"anyOf": [{"type": "integer"}, _text(), {"type": "null"}]},
    {"oneOf": [{"type": "integer"}, _closed(a={"type": "boolean"})]},
    {"oneOf": [_closed(kind={"const": "cat"}, lives={"type": "integer"}), _closed(kind={"const": "dog"})]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"allOf": [{"type": "string", "pattern": "^a"}, {"maxLength": 6}]},
    _closed(),
    _closed(a={"type": "null"}),
    _PERSON,
    _list(_PERSON, 2, minItems=1),
    _TREE,
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 1},
    {"type": "object", "patternProperties": {"^n_[a-z]{1,3}$": {"type": "null"}}, "additionalProperties": False},
    {**_closed(a=_text(), b=_text()), "required": ["b"]},
    {"title": "Call", "description": "a call", "examples": [{}], "default": {}, **_closed(name={"const": "get"})},
    {"type": "string", "maxLength": 30, "contentMediaType": "application/json", "readOnly": True, "deprecated": False},
    {"definitions": {"x": {"type": "boolean"}}, **_closed(x={"$ref": "#/definitions/x"})},
    {"$anchor": "top", "$comment": "no effect", "type": "boolean"},
    {"type": "array", "uniqueItems": False, "items": {"type": "null"}, "maxItems": 2},
    {"type": "integer", "minimum": 1, "exclusiveMinimum": True, "maximum": 4, "exclusiveMaximum": False},
]
