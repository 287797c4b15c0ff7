"""docs/structured-output.md lists what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.errors import RequestError
from quire.structured_output.checker import GrammarChecker
from quire.structured_output.json_schema import REFUSED
from quire.structured_outputs_params import KINDS, StructuredOutputsParams

DOCUMENT = (Path(__file__).parents[2] / "docs" / "structured-output.md").read_text()
TABLE = DOCUMENT.split("| refused | instead |")[1].split("##")[0]
FORMATS = (
    "date", "date-time", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
)  # fmt: skip
"""JSON Schema's own."""
ENFORCED = DOCUMENT.split("These keywords are enforced")[1].split("Annotations")[0]


def test_every_refused_keyword_is_in_the_table_and_no_other() -> None:
    refused = {name for row in TABLE.splitlines()[2:] if row for name in re.findall(r"`([$\w]+)`", row.split("|")[1])}
    assert refused - {"format"} == REFUSED
    assert not REFUSED & set(re.findall(r"`([$\w]+)`", ENFORCED))


def test_every_kind_is_named() -> None:
    assert all(f"`{kind}`" in DOCUMENT for kind in KINDS)


def test_the_formats_that_are_named_and_no_others_are_enforced() -> None:
    named = set(re.findall(r"`([\w-]+)`", ENFORCED.split("`format` with")[1]))
    checker = GrammarChecker()
    answers = {name: _answer(checker, name) for name in FORMATS}
    checker.close()
    assert {name for name, answer in answers.items() if not answer} == named
    assert all(answer in ("", f"response_format: format '{name}' is not supported: use 'pattern'.")
               for name, answer in answers.items())  # fmt: skip


def _answer(checker: GrammarChecker, name: str) -> str:
    """Why a format is refused; empty if it is not."""
    try:
        checker.grammar(StructuredOutputsParams(json={"type": "string", "format": name}, name="response_format"))
    except RequestError as error:
        return error.message
    return ""


@pytest.mark.parametrize("part", [{"type": "integer"}, {"minimum": 3}])
def test_a_one_of_whose_parts_overlap_is_refused_by_name(part: dict[str, object]) -> None:
    checker = GrammarChecker()
    with pytest.raises(RequestError, match="keyword 'oneOf'"):
        checker.grammar(StructuredOutputsParams(json={"oneOf": [part, {"type": "number"}]}))
    checker.close()
