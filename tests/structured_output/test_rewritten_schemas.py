"""What the compiler does not know is said otherwise: valid values are let through, as the `jsonschema` package judges
them, and no others. Schemas are those that pydantic, zod and people write, and many random ones."""

from __future__ import annotations

import json
import random
from collections import Counter
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest

from quire.engine.structured_output.json_schema import SchemaRefused
from tests.structured_output.judged import Compiled


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    owner: Cat | None = None


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Household(pydantic.BaseModel):
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    price: Decimal
    colours: set[Colour]


def _part(tag: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"t": {"const": tag}, **more}, "required": ["t"]}


_PETS = {"Cat": _part("cat", m={"type": "integer"}), "Dog": _part("dog", b={"type": "number"})}
_REFS = [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]
_CHAIN = {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/Cat", "description": "Beside."}, **_PETS}
_TREE = {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/Node"}]}
_NODE = {"type": "object", "properties": {"v": {"enum": [1]}, "next": _TREE}, "required": ["v"],
         "additionalProperties": False}  # fmt: skip
_AB = {"type": "object", "properties": {"a": {"enum": [1]}, "b": {"enum": [2]}}, "additionalProperties": False}
_KIND = {"type": "object", "properties": {"k": {"enum": ["x", "y"]}, "n": {"enum": [1]}}, "required": ["k"],
         "additionalProperties": False}  # fmt: skip

CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "oneOf of references": ({"$defs": _PETS, "oneOf": _REFS}, [{"t": "cat", "m": 1}, {"t": "dog"}], [{}, {"t": "x"}]),
    "a chain of references": (
        {"$defs": _CHAIN, "oneOf": [{"$ref": "#/$defs/A"}, _REFS[1]]}, [{"t": "cat", "m": 1}, {"t": "dog"}], [{}]
    ),
    "references in a circle": (
        {"$defs": {"Node": _NODE}, **_TREE}, [None, {"v": 1, "next": {"v": 1, "next": None}}], [{"v": 1, "next": 1}]
    ),
    "$id and $anchor": (
        {"$id": "https://example.com/root", "$defs": {
            "C": {**_PETS["Cat"], "$anchor": "cat"}, "D": {**_PETS["Dog"], "$id": "dog"}},
         "oneOf": [{"$ref": "#cat"}, {"$ref": "dog"}]},
        [{"t": "cat", "m": 1}, {"t": "dog"}], [{}],
    ),
    "definitions that stand elsewhere": (
        {"components": {"schemas": _PETS}, "oneOf": [{"$ref": f"#/components/schemas/{name}"} for name in _PETS]},
        [{"t": "cat"}, {"t": "dog"}], [{}],
    ),
    "a tag in allOf": (
        {"$defs": _PETS, "oneOf": [{"allOf": [part, {"required": ["m"]}]} for part in _REFS]},
        [{"t": "cat", "m": 1}, {"t": "dog", "m": None}], [{"t": "cat"}],
    ),
    "either of two properties": (
        {**_AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 2}], [{}, {"a": 1, "b": 2}]
    ),
    "parts that overlap": ({"oneOf": [{"minimum": 3}, {"type": "number"}]}, ["x", 2], [3, 4.5]),
    "zod's never": ({"type": "object", "properties": {"a": {"not": {}}}, "additionalProperties": {"type": "null"}},
                    [{}, {"b": None}], [{"a": None}]),
    "not null": ({"type": ["string", "null"], "not": {"type": "null"}}, ["x"], [None]),
    "not a text": ({"type": "string", "not": {"enum": ["", "ab", "ä"]}}, ["a", "abc", "b", "ää"], ["", "ab", "ä"]),
    "not both": ({**_AB, "not": {"required": ["a", "b"]}}, [{}, {"a": 1}, {"b": 2}], [{"a": 1, "b": 2}]),
    "if a tag": (
        {**_KIND, "if": {"properties": {"k": {"const": "x"}}}, "then": {"required": ["n"]},
         "else": {"properties": {"n": False}}},
        [{"k": "x", "n": 1}, {"k": "y"}], [{"k": "x"}, {"k": "y", "n": 1}],
    ),
    "dependentRequired": ({**_AB, "dependentRequired": {"a": ["b"]}}, [{}, {"b": 2}, {"a": 1, "b": 2}], [{"a": 1}]),
    "dependentSchemas": (
        {**_AB, "dependentSchemas": {"a": {"properties": {"b": False}}}}, [{"a": 1}, {"b": 2}], [{"a": 1, "b": 2}]
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": {"type": "null"}},
        [{}, {"a": None, "b": None}], [{"c": None}],
    ),
    "propertyNames that says nothing": (
        {"type": "object", "propertyNames": {"type": "string", "title": "A"}, "additionalProperties": {"type": "null"}},
        [{}, {"a": None}], [{"a": 1}],
    ),
    "propertyNames of an empty schema": (
        {"type": "object", "propertyNames": {}, "additionalProperties": {"type": "null"}}, [{"a": None}], [{"a": 1}],
    ),
    "propertyNames of an enum": (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/K"}, "additionalProperties": {"type": "null"},
         "$defs": {"K": {"enum": ["a"]}}},
        [{}, {"a": None}], [{"b": None}],
    ),
    "unevaluatedProperties": (
        {"type": "object", "properties": {"a": {"enum": [1]}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]
    ),
    "a set of an enum": (
        {"type": "array", "items": {"$ref": "#/$defs/C"}, "uniqueItems": True, "$defs": {"C": {"enum": ["x", "y"]}}},
        [[], ["y"], ["y", "x"], ["x", "y"]], [["x", "x"]],
    ),
    "a set of one": ({"type": "array", "maxItems": 1, "uniqueItems": True}, [[], ["any"]], [["a", "b"]]),
    "look ahead for several": (
        {"type": "string", "pattern": "^(?=.*[a-z])(?=.*\\d)[a-z\\d]{3,8}$"}, ["a1b", "123x"], ["abc", "123", "a1"]
    ),
    "pydantic's Decimal": (
        {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}, ["12.50", "-.5", "7."], ["", ".", "-", "1a"]
    ),
    "not blank": ({"type": "string", "pattern": "^(?!\\s*$).+"}, [" a"], ["", "  "]),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES.values(), ids=CASES)
def test_what_is_said_otherwise_means_the_same(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    judge = jsonschema.Draft202012Validator(schema)
    compiled = Compiled(schema)
    assert compiled.error == ""
    assert [value for value in valid if not judge.is_valid(value)] == [], "the test is wrong"
    assert [value for value in invalid if judge.is_valid(value)] == [], "the test is wrong"
    assert [value for value in valid if not compiled.accepts(value)] == []
    assert [value for value in invalid if compiled.accepts(value)] == []
    chance = random.Random(1)
    walked = [value for _ in range(20) if (value := compiled.walk(chance)) is not None]
    assert [value for value in walked if not judge.is_valid(value)] == []


def test_a_model_of_pydantic_with_default_tags_sets_and_decimals_is_served() -> None:
    compiled = Compiled(Household.model_json_schema())
    assert compiled.error == ""
    for price in ("12.50", "-.5", "7."):
        pet = {"kind": "dog", "owner": {"kind": "cat", "lives": 9}}
        value = {"pet": pet, "price": price, "colours": ["blue", "red"]}
        assert compiled.accepts(value)
        assert Household.model_validate(value)
    wrong = {"pet": {"lives": 9}, "price": "1", "colours": []}
    with pytest.raises(pydantic.ValidationError):
        Household.model_validate(wrong)
    assert not compiled.accepts(wrong), "pydantic needs the tag, though it has a default"
    assert not compiled.accepts({"pet": {"kind": "dog", "owner": None}, "price": "1", "colours": ["red", "red"]})


def test_a_union_of_very_many_is_told_apart_by_its_tag() -> None:
    names = [f"kind-{number}" for number in range(300)]
    union = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in names], "$defs": {name: _part(name) for name in names}}
    compiled = Compiled(union)
    assert compiled.error == ""
    assert compiled.accepts({"t": "kind-299"})
    assert not compiled.accepts({"t": "kind-300"})


def test_what_stands_beside_a_reference_says_nothing_up_to_draft_7() -> None:
    """Parts that exclude each other only there are valid together, as drafts up to 7 have it."""
    parts = [{"$ref": "#/definitions/any", "properties": {"t": {"const": tag}}, "required": ["t"]} for tag in "ab"]
    schema = {"definitions": {"any": {"type": "object"}}, "oneOf": parts}
    assert Compiled(schema).error == ""
    assert "Unsatisfiable" in Compiled({"$schema": "http://json-schema.org/draft-07/schema#", **schema}).error


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (
            {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
            r"'oneOf' .* \(at /properties/a\)",
        ),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"items": {"contains": {}}}}}, r"'contains' .* \(at /\$defs/A/items\)"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "string", "not": {"pattern": "a"}}, "'not'"),
        ({"type": "string", "pattern": "^(?!.*x)y"}, "'pattern' looks ahead"),
        ({"properties": {"a": {"$ref": "http://example.com/x"}}}, r"'\$ref' leads to another document"),
        ({"$ref": "#/$defs/missing"}, r"'\$ref' leads nowhere"),
        ({"$ref": "#missing"}, r"'\$ref' leads nowhere"),
    ],
)
def test_a_strict_schema_is_refused_by_the_keyword_and_where_it_stands(schema: Any, named: str) -> None:
    with pytest.raises(SchemaRefused, match=named):
        Compiled(schema)
    if "leads" not in named:
        loose = Compiled(schema, strict=False)
        assert loose.error == ""
        assert len(loose.left_out) == 1


def test_keywords_beside_a_reference_say_nothing_in_older_drafts() -> None:
    """As draft 7 and those before it say."""
    schema = {"$ref": "#/definitions/a", "maximum": 1, "definitions": {"a": {"type": "integer"}}}
    assert not Compiled(schema).accepts(2)
    assert Compiled({"$schema": "http://json-schema.org/draft-07/schema#", **schema}).accepts(2)


def test_a_schema_that_is_not_strict_is_enforced_as_far_as_it_can_be() -> None:
    schema = {"type": "array", "items": {"type": "string", "format": "path"}, "uniqueItems": True, "maxItems": 2}
    compiled = Compiled(schema, strict=False)
    assert compiled.left_out == ["'uniqueItems'"]
    assert compiled.accepts(["a", "b"])
    assert not compiled.accepts(["a", "b", "c"])


@pytest.mark.parametrize("name", ["path", "password", "binary", "byte", "color", "int32"])
def test_an_unknown_format_is_an_annotation(name: str) -> None:
    assert Compiled({"type": "string", "format": name}).accepts("any text")
    assert Compiled({"type": "integer", "format": name}).accepts(12)


@pytest.mark.parametrize(
    ("name", "valid", "wrong"),
    [
        ("iri", ["http://ƒøø.ßår/?∂=π#ü", "urn:ö"], ["/abc", "http://[::1", "a b:c"]),
        ("iri-reference", ["", "âππ", "#ƒ", "//h/ü"], ["a\\b", "#a#b", "1:2"]),
        ("json-pointer", ["", "/a~0b/~1/ü/", "/"], ["a", "/~2", "#/a"]),
        ("relative-json-pointer", ["0", "12#", "1/a~1b"], ["", "01", "-1", "0##", "/a"]),
        (
            "uri-reference",
            ["", "a/b", "./1:2", "//u@h:8/", "http://[::1]/?q#f", "?q"],
            ["1:2", "\\a", "é", "%zz", "//[:]"],
        ),
        ("uri-template", ["a{b}", "/{+a,b:3,c*}?{&d.e}", "'ü"], ["{", "{a", "a}", "{a:0}", "{^a}", "a b"]),
    ],
)
def test_formats_that_are_regular_are_enforced(name: str, valid: list[str], wrong: list[str]) -> None:
    """The examples follow RFC 3986, 3987, 6570, 6901 and the draft of relative pointers."""
    compiled = Compiled({"type": "string", "format": name})
    assert [text for text in valid if not compiled.accepts(text)] == []
    assert [text for text in wrong if compiled.accepts(text)] == []
    both = Compiled({"format": name, "pattern": "[a#/]$", "maxLength": 9})
    assert both.accepts(7)
    assert both.accepts("/a") is compiled.accepts("/a")
    assert not both.accepts("/b")


def test_a_format_that_no_grammar_expresses_is_refused_or_left_to_the_check() -> None:
    schema = {
        "properties": {
            "a": {"type": ["string", "null"], "format": "regex"},
            "b": {"format": "idn-email", "type": "null"},
        }
    }
    with pytest.raises(
        SchemaRefused, match=r"^keyword 'format' with 'regex' is not supported \(at /properties/a\): leave"
    ):
        Compiled(schema)
    loose = Compiled(schema, strict=False)
    assert loose.left_out == ["'format' (at /properties/a)"]
    assert loose.accepts({"a": "("})


_KEYS = ("a", "b", "c")
_VALUES: tuple[Any, ...] = ("a", "b", "x", "", 0, 1, 2, 3, 1.5, True, False, None)
_LEAVES: tuple[Any, ...] = (
    {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}, True,
    {"type": "string", "maxLength": 1}, {"type": "integer", "minimum": 1}, {"type": "number", "maximum": 2},
    {"type": ["string", "null"]}, {"enum": ["a", 1, None]}, {"const": "b"}, {"$ref": "#/$defs/A"},
    {"$ref": "#/$defs/B"},
)  # fmt: skip


def _random_value(chance: random.Random, depth: int = 2) -> Any:
    kind = chance.random()
    if not depth or kind < 0.5:
        return chance.choice(_VALUES)
    if kind < 0.8:
        return {key: _random_value(chance, depth - 1) for key in _KEYS if chance.random() < 0.5}
    return [_random_value(chance, depth - 1) for _ in range(chance.randrange(3))]


def _random_schema(chance: random.Random, depth: int = 3) -> Any:
    kind = chance.random()
    if not depth or kind < 0.25:
        return chance.choice(_LEAVES)
    if kind < 0.35:
        unique = {"uniqueItems": True} if chance.random() < 0.3 else {}
        return {"type": "array", "items": _random_schema(chance, depth - 1), "maxItems": 2, **unique}
    schema: dict[str, Any] = {"type": chance.choice(["object", "string", "integer", ["object", "string"]])}
    if kind < 0.7:
        properties = {key: _random_schema(chance, depth - 1) for key in _KEYS if chance.random() < 0.7}
        schema = {"type": "object", "properties": properties, "required": [k for k in _KEYS if chance.random() < 0.3]}
        if chance.random() < 0.5:
            schema["additionalProperties"] = chance.choice([False, {"type": "null"}])
    return schema | (_random_keyword(chance, depth) if chance.random() < 0.6 else {})


def _random_keyword(chance: random.Random, depth: int) -> dict[str, Any]:
    one, other = _random_schema(chance, depth - 1), _random_schema(chance, depth - 1)
    return chance.choice([
        {"oneOf": [one, other]}, {"oneOf": [one, other]}, {"not": one}, {"if": one, "then": other},
        {"anyOf": [one, other]}, {"allOf": [one]}, {"dependentRequired": {"a": ["b"]}},
        {"dependentSchemas": {"a": one}},
        {"propertyNames": chance.choice([{"enum": ["a", "c"]}, {"pattern": "^[ab]"}, {"maxLength": 1}])},
    ])  # fmt: skip


def test_no_invalid_value_passes_and_most_random_schemas_are_served() -> None:
    seen: Counter[str] = Counter()
    for seed in range(400):
        chance = random.Random(seed)
        schema = {"allOf": [_random_schema(chance)], "$defs": {key: _random_schema(chance, 2) for key in "AB"}}
        judge = jsonschema.Draft202012Validator(schema)
        try:
            compiled = Compiled(schema)
            judge.is_valid(None)
        except (SchemaRefused, RecursionError):  # a reference to itself alone
            continue
        if compiled.error:
            continue
        seen["served"] += 1
        for value in (compiled.walk(chance) for _ in range(4)):
            assert value is None or judge.is_valid(value), (value, json.dumps(schema))
        for value in (_random_value(chance) for _ in range(8)):
            valid, passes = judge.is_valid(value), compiled.accepts(value)
            assert valid or not passes, (value, json.dumps(schema))
            seen["valid"] += valid
            seen["valid and passes"] += valid and passes
    assert seen["served"] > 200, seen
    assert seen["valid and passes"] > 0.97 * seen["valid"] > 300, "the others have their properties in another order"
