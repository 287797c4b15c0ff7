"""Finished values against whole schemas, in the spelling of any draft."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.engine.structured_output import checker as checker_module
from quire.engine.structured_output.checker import GrammarChecker
from quire.engine.structured_output.finished_value import problem_of
from quire.engine.structured_output.messages import FinishedValue

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def problem(schema: Any, text: str) -> str:
    return problem_of(FinishedValue(json.dumps(schema), text))


@pytest.mark.parametrize(
    ("schema", "valid", "wrong", "said"),
    [
        ({"uniqueItems": True}, "[1, 2]", "[1, 2, 1.0]", "all of it breaks 'uniqueItems'"),
        ({"properties": {"a": {"not": {"type": "string"}}}}, '{"a": 1}', '{"a": "x"}', "/a breaks 'not'"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "2.5", "3", "'oneOf'"),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"b": 1}', '{"a": 1}', "'required'"),
        ({"dependencies": {"a": ["b"]}}, '{"a": 1, "b": 2}', '{"a": 1}', "'dependencies'"),
        ({"contains": {"const": 1}}, "[2, 1]", "[2]", "'contains'"),
        ({"pattern": r"^(?=.*\d).*$"}, '"a1"', '"ab"', "'pattern'"),
        ({"items": [{"type": "integer"}], "additionalItems": False}, "[1]", "[1, 2]", "'additionalItems'"),
        ({"minimum": 3, "exclusiveMinimum": True}, "4", "3", "'minimum'"),
        ({"$schema": DRAFT_4, "minimum": 3, "exclusiveMinimum": True}, "4", "3", "'minimum'"),
        ({"exclusiveMaximum": 3}, "2", "3", "'exclusiveMaximum'"),
        ({"disallow": "string"}, "1", '"x"', "'disallow'"),
        ({"multipleOf": 0.1}, "0.3", "0.35", "'multipleOf'"),
        ({"multipleOf": 0.01}, "1e99", "1.001", "'multipleOf'"),
        ({"unevaluatedProperties": False, "anyOf": [{"properties": {"a": {}}}]}, '{"a": 1}', '{"b": 1}', "unevaluated"),
        ({"type": "array"}, "[]", "[", "it is not JSON"),
    ],
)
def test_what_breaks_a_schema_is_named(schema: Any, valid: str, wrong: str, said: str) -> None:
    assert problem(schema, valid) == ""
    assert said in problem(schema, wrong)


def test_numbers_are_what_they_are_written_as() -> None:
    assert problem({"type": "integer"}, "6000.0") == ""
    assert problem({"type": "number"}, "1e500") == ""
    assert problem({"enum": [1.5, 2.0]}, "2") == ""


def test_a_number_that_is_too_large_to_read_cannot_be_checked() -> None:
    assert problem({"type": "number"}, "1e99999999999999999999").startswith("it could not be checked")
    assert problem_of(FinishedValue('{"minimum": 1e99999999999999999999}', "1")).startswith("it could not be checked")


def test_keywords_beside_a_reference_say_nothing_in_older_drafts() -> None:
    schema = {"$ref": "#/definitions/a", "maximum": 1, "definitions": {"a": {"type": "integer"}}}
    assert "'maximum'" in problem(schema, "2")
    assert problem({"$schema": DRAFT_4, **schema}, "2") == ""


@pytest.mark.parametrize(
    "schema", [{"$ref": "http://example.com/x"}, {"$ref": "#/a"}, {"type": "x"}, {"$dynamicRef": "#"}]
)
def test_a_malformed_schema_cannot_be_checked_and_nothing_is_fetched(schema: Any) -> None:
    assert problem(schema, "1").startswith("it could not be checked")


@pytest.mark.parametrize("draft", [{}, {"$schema": DRAFT_7}])
def test_patterns_are_read_as_the_grammar_reads_them(draft: dict[str, str]) -> None:
    assert problem({**draft, "pattern": r"^\p{L}+$"}, '"ä"') == ""
    assert "'pattern'" in problem({**draft, "pattern": r"^\p{L}+$"}, '"1"')
    closed = {**draft, "patternProperties": {r"^\p{L}+$": {"type": "integer"}}, "additionalProperties": False}
    assert problem(closed, '{"ä": 1}') == ""
    assert "/ä breaks 'type'" in problem(closed, '{"ä": "x"}')
    assert "/1 breaks 'additionalProperties'" in problem(closed, '{"1": 1}')
    assert problem({**draft, "pattern": r"^(?!\p{L})"}, '"1"').startswith("it could not be checked")


def test_a_pattern_that_python_would_search_for_ever_is_no_more_work_than_others() -> None:
    assert "'pattern'" in problem({"pattern": "^(a|a)*$"}, json.dumps("a" * 1_000 + "b"))


def test_formats_that_the_grammar_enforces_elsewhere_are_checked() -> None:
    days = {"patternProperties": {"^d": {"type": "string", "format": "date"}}}
    assert problem(days, '{"d": "2024-12-01"}') == ""
    assert "/d breaks 'format'" in problem(days, '{"d": "2024-13-01"}')
    assert problem({"format": "color"}, '"no colour"') == ""
    assert problem({"format": "uri-reference"}, '"a/b"') == ""
    assert problem({"format": "uri-reference"}, '"1:2"') == "all of it breaks 'format'"
    assert problem({"format": "regex"}, "1") == ""


@pytest.mark.parametrize(
    ("name", "valid", "wrong"),
    [
        (
            "regex",
            [
                "", "^a|b$", r"[^\]\-a-z-]{2,}?", "(?:a)*", "(?<a>.)\\k<a>", "(?<n>a)|(?<n>b)", "(?=a)(?<!b)", r"(a)\1",
                r"\p{Script=Greek}\u{1F600}\x41\cJ\0", r"\@\-\/", "a{,3}", "]", "(?i-m:a)", r"[\w-x]", r"[\b]",
            ],
            [
                "(", ")", "[", "[b-a]", "*", "a**", "a{3,2}", "\\", r"\Z", r"\a", r"\1", "(?<a>b)(?<a>c)", r"\k<a>",
                "(?P<a>b)", "(?<1>a)", "(?ii:a)", "^*", r"\b+", "(?<=a)*", r"\u{110000}", r"\c1", r"\x4", "{1}",
                r"[\B]", "(?#a)", "(?>a)",
            ],
        ),
        ("idn-hostname", ["실례.테스트", "a-b.c", "xn--e1afmkfd"], ["", "-a", "a b", "〮a", "xn--X", "0a.א", "a" * 64]),
        ("idn-email", ["실례@실례.테스트", "a.b@c", '"a b"@c'], ["실례", "@a", "a@", "a..b@c", "a b@c", "a@b_c"]),
    ],
)  # fmt: skip
def test_formats_that_no_grammar_expresses_are_checked(name: str, valid: list[str], wrong: list[str]) -> None:
    """Regular expressions are judged as V8 does, with its flag `u` or, for punctuation, without."""
    assert [text for text in valid if problem({"format": name}, json.dumps(text))] == []
    assert [text for text in wrong if not problem({"format": name}, json.dumps(text))] == []


def test_a_check_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each definition doubles the work."""
    monkeypatch.setattr(checker_module, "CHECK_SECONDS", 0.5)
    definitions = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
    schema = {"$ref": "#/$defs/d0", "$defs": definitions | {"d30": {"type": "integer"}}}
    checker = GrammarChecker()
    try:
        assert "could not be checked within" in checker.problem(FinishedValue(json.dumps(schema), "1"))
        assert checker._helpers._idle == [], "its helper is gone"
        monkeypatch.setattr(checker_module, "CHECK_SECONDS", 100.0)
        assert checker.problem(FinishedValue(json.dumps(schema), "2")), "no more such time is spent under this schema"
    finally:
        checker.close()
