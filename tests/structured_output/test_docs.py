"""docs/structured-output.md lists what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from quire.engine.structured_output.checker import GrammarChecker
from quire.engine.structured_output.formats import CHECKED, PATTERNS
from quire.engine.structured_output.json_schema import FORMATS, REFUSED
from quire.engine.structured_output.schema_rewrites import REWRITTEN
from quire.errors import RequestError
from quire.structured_outputs_params import KINDS, StructuredOutputsParams
from tests.structured_output.judged import Compiled

DOCUMENT = (Path(__file__).parents[2] / "docs" / "structured-output.md").read_text()
TABLE = DOCUMENT.split("These are never enforced:\n\n")[1].split("##")[0]
FORMATS_OF_JSON_SCHEMA = (
    "date", "date-time", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
)  # fmt: skip
"""JSON Schema's own."""
ENFORCED = DOCUMENT.split("These keywords are enforced")[1].split("Annotations")[0]


def test_every_refused_keyword_is_in_the_table_and_no_other() -> None:
    refused = {name for row in TABLE.splitlines()[2:] if row for name in re.findall(r"`([$\w]+)`", row.split("|")[1])}
    assert refused == REFUSED
    assert not REFUSED & set(re.findall(r"`([$\w]+)`", ENFORCED))


def test_every_keyword_that_is_said_otherwise_is_named() -> None:
    assert set(re.findall(r"`([$\w]+)`", ENFORCED)) >= REWRITTEN


def test_every_kind_is_named() -> None:
    assert all(f"`{kind}`" in DOCUMENT for kind in KINDS)


def test_the_formats_that_are_named_and_no_others_are_enforced() -> None:
    named = set(re.findall(r"`([\w-]+)`", ENFORCED.split("`format` with")[1].split(".")[0]))
    assert named == FORMATS | PATTERNS.keys()
    enforced = {name for name in FORMATS_OF_JSON_SCHEMA if not _lets_through(name, "any text at all")}
    assert enforced == named
    known = {name for name in FORMATS_OF_JSON_SCHEMA if not _compiler_error({"type": "string", "format": name})}
    assert known == FORMATS, "the compiler's own"
    assert (
        set(re.findall(r"`([\w-]+)`", DOCUMENT.split("express the formats")[1].split("refused")[0])) == CHECKED.keys()
    )
    assert set(FORMATS_OF_JSON_SCHEMA) == FORMATS | PATTERNS.keys() | CHECKED.keys()


def _lets_through(name: str, text: str) -> bool:
    return Compiled({"type": "string", "format": name}, strict=name not in CHECKED).accepts(text)


def _compiler_error(schema: dict[str, object]) -> str:
    return LLMatcher(LLTokenizer("byte"), json.dumps({"grammars": [{"json_schema": schema}]}), log_level=0).get_error()


@pytest.mark.parametrize("part", [{"type": "integer"}, {"type": "number", "multipleOf": 3}])
def test_a_one_of_whose_parts_overlap_is_refused_by_name(part: dict[str, object]) -> None:
    checker = GrammarChecker()
    with pytest.raises(RequestError, match="keyword 'oneOf'"):
        checker.check(StructuredOutputsParams(json={"oneOf": [part, {"type": "number"}]}))
    checker.close()
