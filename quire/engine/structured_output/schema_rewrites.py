"""Keywords of JSON Schema that the compiler does not know, in keywords that it knows.

Each becomes schemas that must hold besides, under which no other values are valid than before; None where that cannot
be done exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import permutations
from math import perm
from typing import Any

from quire.engine.structured_output.schema_logic import KINDS, Schema, SchemaLogic, schema_of_kinds
from quire.text.output_parsers.schema_references import SchemaReferences

_FEW_PARTS = 64
"""Up to this number, each part of a `oneOf` is compared with all others; more parts must have a tag."""
_MAX_ARRAYS = 512
"""How many arrays of unique items are listed at most."""
_APPLICATORS = frozenset(("$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas", "dependencies"))
_OF_NAMES = frozenset(("const", "enum", "maxLength", "minLength", "pattern", "type"))
_ANNOTATIONS = frozenset(("$comment", "description", "examples", "title"))

_More = list[Schema] | None


class SchemaRewrites:
    """Rewrites keywords of the schemas of one document."""

    def __init__(self, references: SchemaReferences) -> None:
        self._references = references
        self._logic = SchemaLogic(references)
        self._tagged: dict[tuple[int, str], dict[str, Any]] = {}

    def of(self, keyword: str, value: Any, schema: Mapping[str, Any]) -> _More:
        """The schemas that a keyword of REWRITTEN, which has this value in this schema, becomes."""
        return _REWRITES[keyword](self, value, schema)

    def exclusive_parts(self, schema: Mapping[str, Any]) -> _More:
        """Alternatives that may take the place of `oneOf`: what is valid under one is valid under just one part.

        Parts that overlap only as long as a tag is missing must have it, though a part may have a default for it:
        readers of the value need the tag to tell the parts apart.
        """
        parts = schema["oneOf"]
        if len(parts) > _FEW_PARTS:
            key = self._logic.tag(parts)
            return None if key is None else [self._with_tag(part, key) for part in parts]
        overlaps = [
            (i, j) for i, one in enumerate(parts) for j in range(i) if not self._logic.exclusive([one], [parts[j]])
        ]
        if not overlaps:
            return list(parts)
        key = self._logic.tag(parts)
        if key is not None:
            return [self._with_tag(part, key) for part in parts]
        narrowed: list[list[Schema]] = [[part] for part in parts]
        beside = self._beside(schema, "oneOf")
        for i, j in overlaps:
            for own, other in ((i, j), (j, i)):
                opposite = self._logic.opposite(parts[other], [beside, parts[own]])
                if opposite is None:
                    return None
                narrowed[own].append(opposite)
        return [{"allOf": each} if len(each) > 1 else each[0] for each in narrowed]

    def _with_tag(self, part: Schema, key: str) -> Schema:
        target = self._references.resolved(part)
        if not isinstance(target, dict) or "$ref" in target:
            return {"allOf": [part, {"required": [key]}]}
        required = target.get("required")
        required = required if isinstance(required, list) else []
        if key in required:
            return part
        if (id(target), key) not in self._tagged:
            copy = {**target, "required": [*required, key]}
            self._tagged[id(target), key] = self._references.add(f"quire:tagged/{len(self._tagged)}", copy, target)
        return self._tagged[id(target), key]

    def _beside(self, schema: Mapping[str, Any], keyword: str) -> Schema:
        return self._references.keep({key: value for key, value in schema.items() if key != keyword}, schema)

    def _not(self, value: Any, schema: Mapping[str, Any]) -> _More:
        opposite = self._logic.opposite(value, [self._beside(schema, "not")])
        return None if opposite is None else [opposite]

    def _if(self, value: Any, schema: Mapping[str, Any]) -> _More:
        then, other = schema.get("then", True), schema.get("else", True)
        if then is True and other is True:
            return []
        opposite = self._logic.opposite(value, [self._beside(schema, "if")])
        return None if opposite is None else [{"anyOf": [{"allOf": [value, then]}, {"allOf": [opposite, other]}]}]

    def _dependencies(self, value: Any, schema: Mapping[str, Any]) -> _More:
        if not isinstance(value, Mapping):
            return None
        of_objects = {"type": "object"} if self._logic.kinds(schema) == {"object"} else {}
        more: list[Schema] = []
        for name, needed in value.items():
            with_it = {**of_objects, "required": [name, *needed] if isinstance(needed, list) else [name]}
            if not isinstance(needed, list):
                with_it = {"allOf": [with_it, needed]}
            more.append({"anyOf": [{**of_objects, "properties": {name: False}}, with_it]})
        return more

    def _property_names(self, value: Any, schema: Mapping[str, Any]) -> _More:
        names = self._references.resolved(value)
        if names is False:
            return [{"additionalProperties": False}]
        if not isinstance(names, Mapping) or "patternProperties" in schema:
            return None
        asked = names.keys() - _ANNOTATIONS
        if not asked - {"type"}:
            return None if names.get("type", "string") != "string" else []  # names are texts anyway
        if asked - _OF_NAMES or names.get("type", "string") != "string":
            return None
        if asked <= {"type", "enum", "const"}:
            listed = [each for each in self._logic.values(names) or () if isinstance(each, str)]
            return [{"properties": dict.fromkeys(listed, True), "additionalProperties": False}]
        if asked <= {"type", "pattern"}:
            patterns = without_look_ahead(str(names["pattern"]))
            pattern = patterns[0] if patterns is not None and len(patterns) == 1 else None
        elif asked <= {"type", "minLength", "maxLength"}:
            pattern = f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
        else:
            pattern = None
        return None if pattern is None else [{"patternProperties": {pattern: True}, "additionalProperties": False}]

    def _unevaluated_properties(self, value: Any, schema: Mapping[str, Any]) -> _More:
        if value is not False or schema.keys() & _APPLICATORS:
            return None
        if "additionalProperties" in schema:
            return []
        lists = {key: schema[key] for key in ("properties", "patternProperties") if key in schema}
        known = {key: dict.fromkeys(value, True) for key, value in lists.items() if isinstance(value, Mapping)}
        return [{**known, "additionalProperties": False}]

    def _unique_items(self, value: Any, schema: Mapping[str, Any]) -> _More:
        """All arrays without a repeated item, where they are few."""
        most, least = schema.get("maxItems", _MAX_ARRAYS), schema.get("minItems", 0)
        kinds = self._logic.kinds(schema)
        if most in (0, 1) or "array" not in kinds:
            return []
        if not isinstance(most, int) or not isinstance(least, int) or not isinstance(schema.get("items"), dict):
            return None
        values = self._logic.values(schema["items"])
        if values is None or "prefixItems" in schema:
            return None
        lengths = range(least, min(most, len(values)) + 1)
        if len(values) > _MAX_ARRAYS or sum(perm(len(values), length) for length in lengths) > _MAX_ARRAYS:
            return None
        arrays = [list(array) for length in lengths for array in permutations(values, length)]
        others = schema_of_kinds(kinds - {"array"}, set(KINDS)) or []
        return [{"anyOf": [*others, {"enum": arrays}]}] if arrays else [*others] or [False]


_REWRITES: dict[str, Callable[[SchemaRewrites, Any, Mapping[str, Any]], _More]] = {
    "dependencies": SchemaRewrites._dependencies,
    "dependentRequired": SchemaRewrites._dependencies,
    "dependentSchemas": SchemaRewrites._dependencies,
    "else": lambda self, value, schema: [],  # a part of what `if` becomes
    "if": SchemaRewrites._if,
    "not": SchemaRewrites._not,
    "propertyNames": SchemaRewrites._property_names,
    "then": lambda self, value, schema: [],
    "unevaluatedProperties": SchemaRewrites._unevaluated_properties,
    "uniqueItems": SchemaRewrites._unique_items,
}
REWRITTEN = frozenset(_REWRITES)
"""Keywords that are rewritten."""


_BEGINNING = re.compile(r"\^?\(\?[=!]")
_OF_CHARACTERS = re.compile(r"\^?(\[[^\]\\]*(?:\\.[^\]\\]*)*\]|\\[sSdDwW])[*]\$")


def without_look_ahead(pattern: str) -> list[str] | None:
    """Patterns without look-ahead that all match exactly where this pattern does; None if there are none.

    The compiler has no look-around. Two forms can be translated: `^(?=A)B` is `^A` and `^B`; and `^(?![abc]*$)B` is
    `[^abc]` and `^B`, since a text that is not made of certain characters alone has another one.
    """
    if "(?=" not in pattern and "(?!" not in pattern:
        return [pattern]
    found: list[str] = []
    if not pattern.startswith(("^", "(?=^")):
        return None  # it would look ahead from anywhere
    rest = pattern.removeprefix("^")
    while _BEGINNING.match(rest):
        rest = rest.removeprefix("^")
        end = _end_of_group(rest)
        if end is None:
            return None
        negative, inner = rest[2] == "!", rest[3 : end - 1]
        if negative:
            characters = _OF_CHARACTERS.fullmatch(inner)
            if characters is None:
                return None
            found.append(_other_than(characters[1]))
        else:
            found.append(f"^(?:{inner.removeprefix('^')})")
        rest = rest[end:]
    rest = rest.removeprefix("^")
    if rest:
        found.append(f"^{rest}")
    if _alternatives_at_top(rest) or any("(?=" in each or "(?!" in each or "(?<" in each for each in found):
        return None
    return found


def _other_than(characters: str) -> str:
    """The class of all other characters."""
    if characters.startswith("\\"):
        return characters.swapcase()
    return f"[{characters[2:]}" if characters.startswith("[^") else f"[^{characters[1:]}"


def _end_of_group(pattern: str) -> int | None:
    """The place behind the group that a pattern begins with."""
    return next((at + 1 for at, _, depth in _outside_classes(pattern) if depth == 0), None)


def _alternatives_at_top(pattern: str) -> bool:
    return any(character == "|" and depth == 0 for _, character, depth in _outside_classes(pattern))


def _outside_classes(pattern: str) -> Iterator[tuple[int, str, int]]:
    """The characters that are neither escaped nor within brackets: place, character, and depth of groups behind it."""
    at, within, depth = 0, False, 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 2
            continue
        if within:
            within = character != "]"
        elif character == "[":
            within = True
        else:
            depth += (character == "(") - (character == ")")
            yield at, character, depth
        at += 1
