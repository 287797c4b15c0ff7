"""Proofs about JSON schemas: that two exclude each other, and which schema is the opposite of one.

What is not proven is answered by False or None, never by a guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from quire.text.output_parsers.schema_references import SchemaReferences

Schema = Any
"""An object or a boolean; anything else restricts nothing here, and the compiler refuses it."""
KINDS = ("null", "boolean", "integer", "fraction", "string", "array", "object")
"""Types of values; a number is an integer or a fraction."""
_OF_TYPE = {"number": {"integer", "fraction"}, **{kind: {kind} for kind in KINDS if kind != "fraction"}}
_MAX_STEPS = 100_000
"""Limit of the work for all proofs about one document, which take less than a second."""
_DEEPEST = 24
_LARGEST_SIZE = 2**32
_MAX_VALUES = 256
_LONGEST = 100
"""Limits of what is excluded by a pattern: the number of values, and the characters of each."""
_OLDER = ("draft-03", "draft-04", "draft-06", "draft-07")
"""Drafts in which keywords beside `$ref` say nothing."""
_ALL_VALUES: dict[str, list[Any]] = {"null": [None], "boolean": [False, True]}
_SIZES = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}
_OPPOSITE_BOUNDS = {
    "minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum", "exclusiveMaximum": "minimum",
}  # fmt: skip
_NOT_OPPOSED = frozenset((
    "additionalItems", "additionalProperties", "contains", "dependencies", "dependentRequired", "dependentSchemas",
    "disallow", "divisibleBy", "extends", "format", "if", "items", "maxContains", "minContains", "multipleOf", "oneOf",
    "pattern", "patternProperties", "prefixItems", "propertyNames", "unevaluatedItems", "unevaluatedProperties",
    "uniqueItems", "$dynamicRef", "$recursiveRef",
))  # fmt: skip


def ref_is_alone(root: Any) -> bool:
    """Whether keywords beside a `$ref` say nothing in this document."""
    return isinstance(root, Mapping) and any(draft in str(root.get("$schema", "")) for draft in _OLDER)


class SchemaLogic:
    """Proofs about the schemas of one document."""

    def __init__(self, references: SchemaReferences) -> None:
        self._references = references
        self._ref_is_alone = ref_is_alone(references.root)
        self._steps = 0

    def kinds(self, schema: Schema) -> set[str]:
        """The KINDS of values that may be valid under a schema."""
        return self._kinds(self._conjuncts([schema]))

    def tag(self, parts: Sequence[Schema]) -> str | None:
        """A property by which any two of these objects exclude each other once they have it; None if there is none."""
        objects = [self._conjuncts([part]) for part in parts]
        if any(self._kinds(each) != {"object"} for each in objects):
            return None
        common = [key for key in _properties(objects[0]) if all(key in _properties(each) for each in objects[1:])]
        return next((key for key in common if self._all_exclusive([self._of_property(o, key) for o in objects])), None)

    def values(self, schema: Schema) -> list[Any] | None:
        """The values that are valid under a schema, and perhaps some more; None if they are not listed."""
        conjuncts = self._conjuncts([schema])
        kinds = self._kinds(conjuncts)
        found: list[Any] = []
        for kind in KINDS:
            if kind in kinds:
                values = _listed(conjuncts, kind)
                if values is None:
                    return None
                found += values
        return found

    def _all_exclusive(self, schemas: Sequence[list[Schema]]) -> bool:
        """Whether any two of these exclude each other; quick where each lists its values."""
        listed = [self.values({"allOf": each}) for each in schemas]
        keys = [key for values in listed if values is not None for key in {_key(value) for value in values}]
        if None not in listed:
            return len(keys) == len(set(keys))
        return all(self.exclusive(a, b) for i, a in enumerate(schemas) for b in schemas[:i])

    def _spent(self) -> bool:
        self._steps += 1
        return self._steps > _MAX_STEPS

    def _conjuncts(self, schemas: Sequence[Schema]) -> list[Schema]:
        """All schemas that must hold together, behind references and `allOf`; [False] if no value is valid."""
        found: list[Schema] = []
        waiting, seen = list(reversed(schemas)), set()
        while waiting and not self._spent():
            schema = waiting.pop()
            if schema is False:
                return [False]
            if not isinstance(schema, Mapping) or id(schema) in seen:
                continue
            seen.add(id(schema))
            if "$ref" in schema:
                with suppress(LookupError):
                    waiting.append(self._references.target(schema))
                if self._ref_is_alone:
                    continue
            if isinstance(parts := schema.get("allOf"), list):
                waiting += parts
            found.append(schema)
        return found

    def exclusive(self, one: Sequence[Schema], other: Sequence[Schema], depth: int = _DEEPEST) -> bool:
        """Whether it is proven that no value is valid under all schemas of both."""
        if depth < 0 or self._spent():
            return False
        a, b = self._conjuncts(one), self._conjuncts(other)
        if [False] in (a, b):
            return True
        if all(self._kind_exclusive(kind, a, b, depth) for kind in self._kinds(a) & self._kinds(b)):
            return True
        return self._branches_exclusive(a, b, depth) or self._branches_exclusive(b, a, depth)

    def _branches_exclusive(self, own: list[Schema], other: list[Schema], depth: int) -> bool:
        for schema in own:
            for keyword in ("anyOf", "oneOf"):
                parts = schema.get(keyword)
                if isinstance(parts, list) and parts:
                    plain = {key: value for key, value in schema.items() if key not in (keyword, "$ref", "allOf")}
                    rest = [each for each in own if each is not schema] + [self._references.keep(plain, schema)]
                    if all(self.exclusive([part, *rest], other, depth - 1) for part in parts):
                        return True
        return False

    def _kinds(self, conjuncts: Sequence[Schema]) -> set[str]:
        kinds = set(KINDS)
        for schema in conjuncts:
            if schema is False:
                return set()
            if "type" in schema:
                kinds &= _kinds_of(schema["type"])
            if (values := _values(schema)) is not None:
                kinds &= {_kind(value) for value in values}
        return kinds

    def _kind_exclusive(self, kind: str, a: list[Schema], b: list[Schema], depth: int) -> bool:
        one, other = _listed(a, kind), _listed(b, kind)
        if one is not None and other is not None:
            return not {_key(value) for value in one} & {_key(value) for value in other}
        if kind in ("integer", "fraction"):
            return _below(a, b) or _below(b, a)
        if kind not in _SIZES:
            return False
        least, most = _SIZES[kind]
        if _most(a, most) < _least(b, least) or _most(b, most) < _least(a, least):
            return True
        return kind == "object" and any(
            self.exclusive(self._of_property(a, key), self._of_property(b, key), depth - 1)
            for key in _required(a) | _required(b)
        )

    def _of_property(self, conjuncts: Sequence[Schema], key: str) -> list[Schema]:
        """Schemas that a property must be valid under; some may be missing."""
        found = []
        for schema in conjuncts:
            if schema is False:
                return [False]
            properties = schema.get("properties")
            if isinstance(properties, Mapping) and key in properties:
                found.append(properties[key])
            elif not schema.get("patternProperties") and "additionalProperties" in schema:
                found.append(schema["additionalProperties"])
        return found

    def opposite(self, schema: Schema, context: Sequence[Schema], depth: int = _DEEPEST) -> Schema | None:
        """The schema of values that are valid under all of `context`, but not under this one; None if it has none."""
        if isinstance(schema, bool):
            return not schema
        if depth < 0 or self._spent() or not isinstance(schema, Mapping):
            return None
        parts: list[Schema] = []
        conjuncts = self._conjuncts(context)
        alone = "$ref" in schema and self._ref_is_alone
        for keyword, value in schema.items():
            if keyword == "$ref":
                try:
                    opposite = self.opposite(self._references.target(schema), conjuncts, depth - 1)
                except LookupError:
                    return None
                found = None if opposite is None else [opposite]
            else:
                found = [] if alone else self._opposite_of(keyword, value, conjuncts, depth)
            if found is None:
                return None
            parts += found
        parts = [part for part in parts if part is not False]
        if True in parts:
            return True
        return {"anyOf": parts} if len(parts) > 1 else (parts or [False])[0]

    def _opposite_of(self, keyword: str, value: Any, context: list[Schema], depth: int) -> list[Schema] | None:
        """Schemas, one of which is valid where this keyword is violated; None if there are none."""
        if keyword in _NOT_OPPOSED:
            return None
        if keyword == "type":
            return schema_of_kinds(self._kinds(context) - _kinds_of(value), self._kinds(context))
        if keyword in ("const", "enum"):
            return self._other_values([value] if keyword == "const" else value, context)
        if keyword == "required" and isinstance(value, list):
            return [{"type": "object", "properties": {key: False}} for key in value if isinstance(key, str)]
        if keyword == "properties" and isinstance(value, Mapping):
            return self._opposite_properties(value, context, depth)
        if keyword in _OPPOSITE_BOUNDS:
            return [{"type": "number", _OPPOSITE_BOUNDS[keyword]: value}] if _is_number(value) else None
        for kind, (least, most) in _SIZES.items():
            if keyword in (least, most) and _is_number(value) and abs(value) < _LARGEST_SIZE:
                if keyword == most:
                    return [{"type": kind, least: int(value) + 1}]
                return [{"type": kind, most: int(value) - 1}] if value > 0 else []
        if keyword == "not":
            return [value]
        if keyword in ("allOf", "anyOf") and isinstance(value, list):
            parts = [self.opposite(part, context, depth - 1) for part in value]
            if any(part is None for part in parts):
                return None
            if keyword == "anyOf":
                return [] if False in parts else [{"allOf": parts}]
            return parts
        return []  # an annotation, or unknown

    def _opposite_properties(
        self, properties: Mapping[str, Schema], context: list[Schema], depth: int
    ) -> list[Schema] | None:
        found = []
        for key, schema in properties.items():
            opposite = self.opposite(schema, self._of_property(context, key), depth - 1)
            if opposite is None:
                return None
            if opposite is not False:
                found.append({"type": "object", "properties": {key: opposite}, "required": [key]})
        return found

    def _other_values(self, values: Any, context: list[Schema]) -> list[Schema] | None:
        if not isinstance(values, list) or len(values) > _MAX_VALUES:
            return None
        kinds = self._kinds(context)
        excluded = {_key(value) for value in values}
        parts: list[Schema] = []
        left: list[Any] = []
        whole = set(kinds)
        for kind in kinds & {_kind(value) for value in values}:
            listed = _listed(context, kind)
            if listed is not None:
                left += [value for value in listed if _key(value) not in excluded]
            elif kind == "string" and all(len(value) <= _LONGEST for value in values if isinstance(value, str)):
                parts.append({"type": "string", "pattern": other_than([v for v in values if isinstance(v, str)])})
            else:
                return None
            whole.discard(kind)
        rest = schema_of_kinds(whole, kinds)
        return None if rest is None else [*rest, *parts, *([{"enum": left}] if left else [])]


def other_than(texts: Sequence[str]) -> str:
    """A pattern that matches every text but these."""
    tree: dict[str, Any] = {}
    for text in texts:
        place = tree
        for character in text:
            place = place.setdefault(character, {})
        place[""] = {}
    return f"^{_other_than(tree)}$"


def _other_than(tree: dict[str, Any]) -> str:
    known = [character for character in tree if character]
    if not known:
        return "[\\s\\S]+" if "" in tree else "[\\s\\S]*"
    names = {character: f"\\x{{{ord(character):x}}}" for character in known}
    parts = [f"[^{''.join(names.values())}][\\s\\S]*"] + ([] if "" in tree else [""])
    parts += [names[character] + _other_than(tree[character]) for character in known]
    return f"(?:{'|'.join(parts)})"


def _kinds_of(types: Any) -> set[str]:
    names = types if isinstance(types, list) else [types]
    return set().union(*(_OF_TYPE.get(name, set(KINDS)) if isinstance(name, str) else set(KINDS) for name in names))


def schema_of_kinds(kinds: set[str], among: set[str]) -> list[Schema] | None:
    """The schema of these kinds of values, where only kinds of `among` occur; None if it cannot be said."""
    if "fraction" in kinds and "integer" not in kinds and "integer" in among:
        return None
    names = sorted({"number" if kind == "fraction" else kind for kind in kinds})
    if "number" in names:
        names = [name for name in names if name != "integer"]
    return [{"type": names if len(names) > 1 else names[0]}] if names else []


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "fraction"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _key(value: Any) -> str:
    """A text that equal values have in common, and no others."""
    return json.dumps(_normal(value), sort_keys=True)


def _normal(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_normal(each) for each in value]
    if isinstance(value, dict):
        return {key: _normal(each) for key, each in value.items()}
    return value


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _listed(conjuncts: Sequence[Schema], kind: str) -> list[Any] | None:
    """The values of a kind, and perhaps some more; None if they are not listed."""
    found: list[Any] | None = _ALL_VALUES.get(kind)
    for schema in conjuncts:
        values = _values(schema)
        if values is not None:
            own = [value for value in values if _kind(value) == kind]
            kept = {_key(value) for value in own}
            found = own if found is None else [value for value in found if _key(value) in kept]
    return found


def _properties(conjuncts: Sequence[Schema]) -> list[str]:
    return [
        key for schema in conjuncts if isinstance(schema.get("properties"), Mapping) for key in schema["properties"]
    ]


def _required(conjuncts: Sequence[Schema]) -> set[str]:
    lists = [schema.get("required") for schema in conjuncts]
    return {key for each in lists if isinstance(each, list) for key in each if isinstance(key, str)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _least(conjuncts: Sequence[Schema], keyword: str) -> float:
    return max((schema[keyword] for schema in conjuncts if _is_number(schema.get(keyword))), default=float("-inf"))


def _most(conjuncts: Sequence[Schema], keyword: str) -> float:
    return min((schema[keyword] for schema in conjuncts if _is_number(schema.get(keyword))), default=float("inf"))


def _below(a: Sequence[Schema], b: Sequence[Schema]) -> bool:
    """Whether all numbers under `a` are less than those under `b`."""
    most = min(_most(a, "maximum"), _most(a, "exclusiveMaximum"))
    least = max(_least(b, "minimum"), _least(b, "exclusiveMinimum"))
    open_end = most == _most(a, "exclusiveMaximum") or least == _least(b, "exclusiveMinimum")
    return most < least or (most == least and open_end)
