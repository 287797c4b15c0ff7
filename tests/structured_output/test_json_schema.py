"""What becomes of a schema before it is compiled."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.structured_output.json_schema import REFUSED, WHITESPACE, SchemaRefused, prepare_schema


def prepared(schema: Any, **options: Any) -> dict[str, Any]:
    result = prepare_schema(schema, **options)
    del result["x-guidance"]
    return result


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_a_refused_keyword_is_named_wherever_it_stands(keyword: str) -> None:
    for schema in (
        {keyword: "x"},
        {"properties": {"a": {"items": [{keyword: "x"}]}}},
        {"anyOf": [{"additionalProperties": {keyword: "x"}}]},
        {"$defs": {"a": {keyword: "x"}}, "items": {"$ref": "#/$defs/a"}},
    ):
        with pytest.raises(SchemaRefused, match=f"'{keyword.replace('$', '.')}'"):
            prepared(schema)


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_a_property_may_be_called_like_a_keyword(keyword: str) -> None:
    schema = {"properties": {keyword: {"type": "string"}}, "required": [keyword], "enum": [{keyword: 1}]}
    assert prepared(schema) == schema


def test_what_nothing_refers_to_is_not_looked_at() -> None:
    assert prepared({"type": "null", "$defs": {"a": {"contains": {}}}}) == {"type": "null"}


def test_keywords_that_restrict_nothing_are_dropped() -> None:
    assert prepared({"uniqueItems": False, "minContains": 0, "unevaluatedProperties": True}) == {}


def test_exclusive_bounds_of_draft_4_become_numbers() -> None:
    schema = {"minimum": 1, "exclusiveMinimum": True, "maximum": 9, "exclusiveMaximum": False}
    assert prepared(schema) == {"exclusiveMinimum": 1, "maximum": 9}


def test_closed_objects_have_no_other_properties() -> None:
    schema = {"properties": {"a": {"properties": {}}, "b": {"properties": {}, "additionalProperties": True}}}
    closed = prepared(schema, closed=True)
    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"]["additionalProperties"] is False
    assert closed["properties"]["b"]["additionalProperties"] is True


def test_a_client_cannot_set_the_compilers_options() -> None:
    sent = {"x-guidance": {"lenient": True, "coerce_one_of": True}}
    assert prepare_schema(sent)["x-guidance"] == {"whitespace_pattern": WHITESPACE}
    assert prepare_schema(sent, whitespace=" ?")["x-guidance"] == {"whitespace_pattern": " ?"}
    assert prepare_schema(sent, any_whitespace=False)["x-guidance"] == {"whitespace_flexible": False}


def test_a_schema_nests_only_so_deep() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100):
        schema = {"items": schema}
    with pytest.raises(SchemaRefused, match="deep"):
        prepared(schema)
