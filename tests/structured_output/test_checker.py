"""Constraints are tried by a helper process, which may be killed by them; the caller gets a grammar or a refusal."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quire.engine.structured_output.checker import GrammarChecker
from quire.errors import RequestError
from quire.structured_outputs_params import StructuredOutputsParams
from quire.text.output_parsers.call_grammar import call_grammar
from quire.text.output_parsers.events import Tool

EXPLOSIVE: dict[str, dict[str, Any]] = {
    "a multiple of a large prime": {"json": {"type": "integer", "multipleOf": 99999989}},
    "many patterns of properties": {
        "json": {"patternProperties": {f"^{i}a.*b": {"type": "integer"} for i in range(1000)}}
    },
    "many patterns at once": {"json": {"type": "string", "allOf": [{"pattern": f".*a{i}.*"} for i in range(45)]}},
}


TOO_MANY = "^$|(^(?:\\S+\\s+){0,99}\\S+$)"
"""Compiles, and needs too much after some tokens."""


def calls(name: str, parameters: dict[str, Any]) -> str:
    """The grammar of an answer that must call a tool, which is strict."""
    return call_grammar("hermes", [Tool(name, parameters, strict=True)], must_call=True)


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker({"<|end|>": 4000})
    yield checker
    checker.close()


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {"json": '{"type": "string"}'},
        {"json": True},
        {"json_object": True},
        {"regex": "[0-9]{3}/[a-z]+"},
        {"choice": ["a/b", 'c"d', "\n", "ü"]},
        {"grammar": 'start: "a" b*\nb: "b"'},
        {"grammar": 'root ::= "(" root ")" | [a-z]*'},
        {"structural_tag": {"format": {"type": "const_string", "value": "a<|end|>b"}}},
    ],
)
def test_a_sound_constraint_becomes_a_grammar(checker: GrammarChecker, asked: dict[str, Any]) -> None:
    params = StructuredOutputsParams(**asked)
    assert checker.known(params) is None
    verdict = checker.check(params)
    assert verdict.grammar
    assert checker.known(params) == verdict


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        (
            {"json": {"properties": {"a": {"anyOf": [{"not": {"pattern": "a"}}]}}}},
            r"'not' .* \(at /properties/a/anyOf/0\)",
        ),
        (
            {"json": {"type": "string", "maxLength": 5000, "pattern": TOO_MANY}},
            "^response_format: it becomes too complex",
        ),
        (
            {"grammar": calls("get", {"properties": {"a": {"contains": {}}}})},
            r"^response_format: the parameters of the function 'get': keyword 'contains' .* \(at /properties/a\)",
        ),
        (
            {"grammar": calls("get", {"type": "object", "properties": {"a": {"minItems": -1}}})},
            "^response_format: Expected positive integer for 'minItems', got -1.$",
        ),
        ({"json": {"type": "strong"}}, "strong"),
        ({"json": False}, "nothing"),
        ({"json": {"$ref": "http://example.com/schema"}}, "example.com"),
        ({"regex": "(a|b"}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"grammar": "start: b"}, "unknown name"),
        ({"grammar": "root ::= b"}, "'b', which is not defined"),
        ({"structural_tag": {"format": {"type": "poem"}}}, "poem"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(checker: GrammarChecker, asked: dict[str, Any], named: str) -> None:
    params = StructuredOutputsParams(**asked, name="response_format")
    with pytest.raises(RequestError, match=named) as caught:
        checker.check(params)
    assert caught.value.param == "response_format"
    with pytest.raises(RequestError, match=named):
        checker.known(params)


@pytest.mark.parametrize("asked", EXPLOSIVE.values(), ids=EXPLOSIVE)
def test_an_explosive_constraint_is_given_up_in_time_and_others_pass_meanwhile(
    checker: GrammarChecker, asked: dict[str, Any]
) -> None:
    refused: list[Exception] = []

    def explode() -> None:
        try:
            checker.check(StructuredOutputsParams(**asked))
        except RequestError as error:
            refused.append(error)

    for helper in [checker._helpers._take() for _ in range(2)]:  # to start one may take as long as the other has
        checker._helpers._put_back(helper)
    began = time.monotonic()
    thread = threading.Thread(target=explode)
    thread.start()
    assert checker.check(StructuredOutputsParams(json={"type": "string", "maxLength": len(str(asked))}))
    assert thread.is_alive(), "the sound one passed while the other was tried"
    thread.join()
    assert time.monotonic() - began < 60  # 2 s on an idle machine; as long as nobody ends it, minutes
    assert "make it smaller" in str(refused[0])


def test_grammars_may_nest_deeply_without_ending_the_helper(checker: GrammarChecker) -> None:
    rules = {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(3000)} | {"r3000": {"type": "string"}}
    assert checker.check(StructuredOutputsParams(json={"$ref": "#/$defs/r0", "$defs": rules}))


def test_what_a_schema_that_is_not_strict_leaves_out_is_named_once_in_the_log(
    checker: GrammarChecker, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "array", "contains": {"const": 1}}}}
    for _ in range(2):
        assert checker.check(StructuredOutputsParams(json=schema, strict=False, name="response_format"))
    (record,) = caplog.records
    assert "response_format: " in record.getMessage()
    assert "'contains' (at /properties/tags)" in record.getMessage()
    with pytest.raises(RequestError, match="'contains'"):
        checker.check(StructuredOutputsParams(json=schema))


def test_what_cannot_be_said_otherwise_in_time_is_left_out(checker: GrammarChecker) -> None:
    """Each dependency doubles the alternatives: too many for the compiler, so a loose schema goes without them."""
    names = [f"p{number}" for number in range(24)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "dependentRequired": {name: [names[0]] for name in names[1:]},
    }
    assert checker.check(StructuredOutputsParams(json=schema, strict=False))


@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        (
            {
                "$ref": "#/$defs/n",
                "$defs": {
                    "n": {"type": "object", "allOf": [{"$ref": "#/$defs/m"}]},
                    "m": {"properties": {"c": {"items": {"$ref": "#/$defs/n", "minProperties": 1}}}},
                },
            },
            "'$ref' (at /$defs/m/properties/c/items)",
        ),
        ({"patternProperties": {"^a": {"type": "integer"}, "b$": {"type": "string"}}}, "'patternProperties'"),
        ({"patternProperties": {"^(?!x).+$": {"type": "integer"}}}, "'patternProperties'"),
        ({"type": "number", "minimum": 0, "maximum": 1.79769e308}, "'maximum'"),
    ],
)
def test_what_the_compiler_cannot_cope_with_is_left_out(
    checker: GrammarChecker, schema: dict[str, Any], left_out: str
) -> None:
    """Of schemas that are not strict; others are refused."""
    (found,) = checker.check(StructuredOutputsParams(json=schema, strict=False)).lenient
    assert left_out in found.left_out
    assert json.loads(found.schema) == schema
    with pytest.raises(RequestError):
        checker.check(StructuredOutputsParams(json=schema))


def test_a_signal_to_all_processes_does_not_end_a_helper(checker: GrammarChecker) -> None:
    assert checker.check(StructuredOutputsParams(regex="[a-f]{3}"))
    (helper,) = checker._helpers._idle
    os.kill(helper.pid, signal.SIGTERM)
    assert checker.check(StructuredOutputsParams(regex="[a-f]{4}"))
    assert checker._helpers._idle == [helper], "the same one"
