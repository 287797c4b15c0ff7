"""JSON schemas as the grammar compiler takes them.

Keywords that the compiler would refuse or pass over are rewritten where that can be done exactly. Otherwise a strict
schema is refused by the keyword's name, and in another schema the keyword is left out. The spelling of older drafts
becomes that of 2020-12. All that a schema refers to is found here and stands in its `$defs` afterwards.
"""

from __future__ import annotations

from contextlib import suppress
from enum import IntFlag
from typing import Any, NamedTuple

from quire.engine.structured_output.formats import CHECKED, PATTERNS
from quire.engine.structured_output.schema_logic import ref_is_alone
from quire.engine.structured_output.schema_rewrites import REWRITTEN, SchemaRewrites, without_look_ahead
from quire.text.output_parsers.schema_references import MAX_DEPTH, SchemaReferences

WHITESPACE = r"(\n[ ]{0,24}|[ ])?"
"""Default whitespace between the parts of JSON: enough for any usual indentation. Without a bound, a model can go on
with spaces for ever."""

REFUSED = frozenset((
    "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "contains", "disallow", "divisibleBy",
    "extends", "maxContains", "minContains", "unevaluatedItems",
))  # fmt: skip
"""Keywords that restrict what is valid and are never enforced."""
FORMATS = frozenset((
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
))  # fmt: skip
"""Formats that the compiler knows. Those of `formats` are enforced as patterns, or checked on the finished value;
others are annotations."""

_NEUTRAL: tuple[tuple[str, Any], ...] = (
    ("uniqueItems", False),
    ("minContains", 0),
    ("unevaluatedItems", True),
    ("unevaluatedProperties", True),
    ("propertyNames", True),
    ("propertyNames", {"type": "string"}),
    ("dependencies", {}),
    ("dependentRequired", {}),
    ("dependentSchemas", {}),
)
"""Keywords with a value that restricts nothing: generators of schemas write these."""
_DROPPED = frozenset(("$defs", "definitions", "$id", "id", "$anchor", "$schema", "x-guidance", "x-quire"))
"""Keywords that say where a schema stands, which are not needed once references are resolved."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_EXTREME = 1e300
_MAX_SCHEMAS = 50_000
"""How many schemas one schema may become."""


class Simplified(IntFlag):
    """What is left out of a schema that is not strict, though it can be enforced elsewhere."""

    NOT = 0
    REWRITES = 1
    """What would have to be rewritten: it may be too much for the compiler."""
    PATTERNS = 2
    """Patterns of properties: the compiler needs them to be disjoint, and without look-around."""
    CYCLES = 4
    """References that close a cycle: the compiler needs one in each that stands alone."""


SIMPLER = (Simplified.REWRITES, Simplified.PATTERNS, Simplified.CYCLES, Simplified(7))
"""What is tried in turn if a schema does not compile."""


class SchemaRefused(ValueError):
    """The schema cannot be honoured in full; the message names the keyword and where it stands."""


def prepare_schema(
    schema: Any, *, whitespace: str | None = None, any_whitespace: bool = True, closed: bool = False,
    left_out: list[str] | None = None, simplified: Simplified = Simplified.NOT,
) -> dict[str, Any]:  # fmt: skip
    """A schema for the compiler.

    Args:
        schema: Parsed JSON; an object or a boolean.
        whitespace: A regular expression for the whitespace between parts; None for WHITESPACE.
        any_whitespace: Whether there may be whitespace between parts at all.
        closed: Whether objects that do not mention additional properties have none.
        left_out: Where to name what cannot be enforced and is left out; None to refuse it.
        simplified: What is left out though it might be enforced.

    Raises:
        SchemaRefused: The schema cannot be honoured, or is malformed.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise SchemaRefused("the schema allows nothing")
    options: dict[str, Any] = {"whitespace_flexible": False}
    if any_whitespace:
        options = {"whitespace_pattern": WHITESPACE if whitespace is None else whitespace}
    if left_out is not None:
        options["lenient"] = True
    prepared = _Preparation(schema, closed, left_out, simplified).document()
    return {**prepared, "x-guidance": options}  # takes the place of one that the client may have sent


class _Preparation:
    def __init__(self, root: dict[str, Any], closed: bool, left_out: list[str] | None, simplified: Simplified) -> None:
        self._root = root
        self._closed = closed
        self._left_out = left_out
        self._simplified = simplified
        self._references = SchemaReferences(root)
        self._ref_is_alone = ref_is_alone(root)
        self._rewrites = SchemaRewrites(self._references)
        self._names: dict[int, str] = {}  # of definitions, by identity
        self._waiting: list[tuple[Any, str, str]] = []  # definitions, their names, and where they stand
        self._current: Any = root  # the definition that is prepared
        self._num_schemas = 0

    def document(self) -> dict[str, Any]:
        """The document, with all that it refers to."""
        found: dict[str, Any] | bool = self._schema(self._root, "", 0)
        definitions: dict[str, Any] = {}
        while self._waiting:
            self._current, name, place = self._waiting.pop()
            definitions[name] = self._schema(self._current, place, 0)
        if isinstance(found, bool):
            raise SchemaRefused("the schema allows nothing")
        draft = self._root.get("$schema")
        named = {"$schema": draft} if isinstance(draft, str) else {}
        return named | found | ({"$defs": definitions} if definitions else {})

    def _schema(self, schema: Any, place: str, depth: int, made: bool = False) -> Any:
        """Prepare a schema and all in it. `made` says that it was not sent as it is, so it is not closed."""
        if not isinstance(schema, dict):
            return schema
        self._num_schemas += 1
        if self._references.too_deep:
            raise SchemaRefused(f"schemas are nested more than {MAX_DEPTH} deep")
        if depth > 2 * MAX_DEPTH or self._num_schemas > _MAX_SCHEMAS:
            raise SchemaRefused("the schema is too large once it is written out: make it smaller")
        prepared: dict[str, Any] = {}
        more: list[Any] = []  # what must hold besides
        at = _Place(place, depth, made)
        for keyword, value in self._taken(schema, place).items():
            if keyword in _DROPPED:
                continue
            if keyword in REFUSED:
                self._refuse(keyword, place)
            elif keyword in REWRITTEN:
                self._rewrite(keyword, value, schema, more, at)
            elif keyword == "oneOf" and isinstance(value, list):
                self._one_of(schema, prepared, more, at)
            elif keyword == "format" and isinstance(value, str) and value not in FORMATS:
                self._format(value, schema, more, place)
            elif keyword == "pattern" and isinstance(value, str):
                self._pattern(value, prepared, more, at)
            elif keyword == "$ref":
                self._reference(schema, prepared, more, at)
            else:
                prepared[keyword] = self._value(keyword, value, at)
        if self._closed and not made and "properties" in prepared:
            prepared.setdefault("additionalProperties", False)
        if False in more:
            return False
        rest = [self._schema(each, place, depth + 1, True) for each in more]
        return {"allOf": [prepared, *rest]} if rest else prepared

    def _taken(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """The keywords of a schema that say something, but for those that are left out without being tried."""
        if self._ref_is_alone and "$ref" in schema:
            return {"$ref": schema["$ref"]}
        schema = _modern(schema)
        left_out = [key for key in _BOUNDS if self._simplified and _is_extreme(schema.get(key))]
        if Simplified.PATTERNS in self._simplified and "patternProperties" in schema:
            left_out += ["patternProperties", "additionalProperties"]
        for key in left_out:
            if schema.pop(key, None) is not None:
                self._refuse(key, place)
        return schema

    def _value(self, keyword: str, value: Any, at: _Place) -> Any:
        place, depth = f"{at.place}/{keyword}", at.depth + 1
        if keyword in ("properties", "patternProperties") and isinstance(value, dict):
            return {name: self._schema(each, f"{place}/{name}", depth, at.made) for name, each in value.items()}
        if isinstance(value, list) and keyword in ("allOf", "anyOf", "prefixItems", "items"):
            return [
                self._schema(each, f"{place}/{number}", depth, at.made or not self._references.knows(each))
                for number, each in enumerate(value)
            ]
        if keyword in ("additionalProperties", "items", "additionalItems"):
            return self._schema(value, place, depth, at.made)
        return value

    def _refuse(
        self, keyword: str, place: str, problem: str = "is not supported", advice: str = "leave it out"
    ) -> None:
        where = f" (at {place[:120]})" if place else ""
        if self._left_out is None:
            raise SchemaRefused(f"keyword '{keyword}' {problem}{where}: {advice}")
        self._left_out.append(f"'{keyword}'{where}")

    def _rewrite(self, keyword: str, value: Any, schema: dict[str, Any], more: list[Any], at: _Place) -> None:
        found = None if Simplified.REWRITES in self._simplified else self._rewrites.of(keyword, value, schema)
        if found is None:
            self._refuse(keyword, at.place, "is not supported here")
        else:
            more += [each for each in found if each is not True]

    def _one_of(self, schema: dict[str, Any], prepared: dict[str, Any], more: list[Any], at: _Place) -> None:
        parts = None if Simplified.REWRITES in self._simplified else self._rewrites.exclusive_parts(schema)
        if parts is None:
            self._refuse("oneOf", at.place, "is supported only where its parts exclude each other", "use 'anyOf'")
            parts = schema["oneOf"]
        if "anyOf" in schema:
            more.append({"anyOf": parts})
        else:
            prepared["anyOf"] = self._value("anyOf", parts, at)

    def _pattern(self, pattern: str, prepared: dict[str, Any], more: list[Any], at: _Place) -> None:
        patterns = without_look_ahead(pattern)
        if patterns is not None:
            prepared["pattern"] = patterns[0]
            more += [{"type": "string", "pattern": each} for each in patterns[1:]]
        else:
            self._refuse("pattern", at.place, "looks ahead, which is not supported", "write it without look-around")

    def _format(self, name: str, schema: dict[str, Any], more: list[Any], place: str) -> None:
        if not _may_be_text(schema):
            return
        if name in PATTERNS:
            more.append({"pattern": PATTERNS[name]})
        elif name in CHECKED:
            self._refuse("format", place, f"with '{name}' is not supported")

    def _reference(self, schema: dict[str, Any], prepared: dict[str, Any], more: list[Any], at: _Place) -> None:
        try:
            target = self._references.target(schema)
        except KeyError:  # never left out: nothing would be left of the schema
            raise SchemaRefused(
                f"keyword '$ref' leads to another document, '{str(schema['$ref'])[:120]}': put what it leads to into "
                "'$defs'"
            ) from None
        except LookupError as error:
            raise SchemaRefused(f"keyword '$ref' leads nowhere: '{str(error)[:120]}'") from None
        if Simplified.CYCLES in self._simplified and isinstance(target, dict) and self._closes_cycle(target):
            self._refuse("$ref", at.place)
        elif isinstance(target, dict):
            prepared["$ref"] = self._defined(target, schema["$ref"])
        elif isinstance(target, bool):
            more += [] if target else [False]
        else:
            raise SchemaRefused(f"keyword '$ref' leads to no schema: '{schema['$ref'][:120]}'")

    def _closes_cycle(self, target: dict[str, Any]) -> bool:
        """Whether a definition that was met before refers to the one that is prepared now, also by way of others."""
        if target is not self._root and id(target) not in self._names:
            return False
        seen: set[int] = {id(target)}
        waiting: list[Any] = [target]
        while waiting:
            each = waiting.pop()
            if each is self._current:
                return True
            inner = [*each.values()] if isinstance(each, dict) else [*each]
            if isinstance(each, dict) and "$ref" in each:
                with suppress(LookupError):
                    inner.append(self._references.target(each))
            found = [part for part in inner if isinstance(part, dict | list) and id(part) not in seen]
            seen.update(map(id, found))
            waiting += found
        return False

    def _defined(self, target: dict[str, Any], place: str) -> str:
        """The reference to a definition, which is made once."""
        if target is self._root:
            return "#"
        if id(target) not in self._names:
            self._names[id(target)] = f"d{len(self._names)}"
            self._waiting.append((target, self._names[id(target)], place.removeprefix("#")))
        return f"#/$defs/{self._names[id(target)]}"


class _Place(NamedTuple):
    """Where a schema stands: how that is shown, how deep, and whether the schema was made here instead of sent."""

    place: str
    depth: int
    made: bool


def _is_extreme(bound: Any) -> bool:
    """Whether a bound has more digits than the compiler writes patterns for."""
    return isinstance(bound, int | float) and abs(bound) >= _EXTREME


def _may_be_text(schema: dict[str, Any]) -> bool:
    """Whether a schema's own `type` allows strings, which formats speak about."""
    kinds = schema.get("type", "string")
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def _modern(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without keywords that say nothing, and with draft 4's exclusive bounds as numbers."""
    schema = {keyword: value for keyword, value in schema.items() if (keyword, value) not in _NEUTRAL}
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if schema.get(exclusive) is True and bound in schema:
            schema[exclusive] = schema.pop(bound)
        elif isinstance(schema.get(exclusive), bool):
            del schema[exclusive]
    return schema
