"""Every finished output of a constrained model is valid, as the `jsonschema` package judges it.

Some 250 schemas cover the keywords that the compiler claims, of each draft, under two models. They are bounded, so
nearly every output finishes.
"""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.outputs import CompletionOutput
from tests.structured_output.own_schemas import OWN_SCHEMAS

_FILE = Path(__file__).parent / "suite_schemas.json"
_VALIDATORS: dict[str, Any] = {
    "draft4": jsonschema.Draft4Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}
_KEYWORDS = {
    "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "enum", "exclusiveMaximum",
    "exclusiveMinimum", "format", "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems", "minLength",
    "minProperties", "minimum", "multipleOf", "oneOf", "pattern", "patternProperties", "prefixItems", "properties",
    "required", "type",
}  # fmt: skip


def schemas() -> list[tuple[Any, dict[str, Any]]]:
    """Each schema and who judges its outputs."""
    suite = [(_VALIDATORS[row["draft"]], row["schema"]) for row in json.loads(_FILE.read_text())["schemas"]]
    return suite + [(_own_validator(schema), schema) for schema in OWN_SCHEMAS]


def _own_validator(schema: dict[str, Any]) -> Any:
    if isinstance(schema.get("exclusiveMinimum"), bool):
        return jsonschema.Draft4Validator
    older = isinstance(schema.get("items"), list)
    return jsonschema.Draft7Validator if older else jsonschema.Draft202012Validator


def keywords(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(keywords, schema)) if schema else set()
    if not isinstance(schema, dict):
        return set()
    return set(schema).union(*map(keywords, schema.values())) if schema else set()


def test_the_schemas_cover_the_keywords() -> None:
    found = schemas()
    assert len(found) >= 200
    assert set().union(*(keywords(schema) for _, schema in found)) >= _KEYWORDS


def problem(output: CompletionOutput, validator: Any, schema: dict[str, Any]) -> str:
    """What is wrong with a finished output; empty if nothing is."""
    number = Decimal if "multipleOf" in keywords(schema) else float  # 1.4 / 0.0001 is no integer in floats
    schema = json.loads(json.dumps(schema), parse_float=number)
    try:
        document = json.loads(output.text, parse_float=number)
    except ValueError as error:
        return f"{error}: {output.text!r}"
    errors = [
        error.message for error in validator(schema, format_checker=validator.FORMAT_CHECKER).iter_errors(document)
    ]
    return f"{errors[0]}: {output.text!r} under {schema}" if errors else ""


@pytest.mark.long("api")
@pytest.mark.parametrize("weights", ["auto", "dummy"])
def test_all_finished_outputs_validate_and_nearly_all_finish(weights: str) -> None:
    cases = schemas()
    asked = [
        SamplingParams(
            max_tokens=300, temperature=1.0, seed=seed, structured_outputs=StructuredOutputsParams(json=schema)
        )
        for seed, (_, schema) in enumerate(cases)
    ]
    with LLM(max_model_len=512, max_num_seqs=64, load_format=weights) as llm:
        asks = [
            [{"role": "user", "content": f"JSON of this schema: {json.dumps(schema)[:200]}"}] for _, schema in cases
        ]
        answers = llm.chat(asks, asked, use_tqdm=False)
    outputs = [answer.outputs[0] for answer in answers]
    reasons = Counter(output.finish_reason for output in outputs)
    finished = [(output, case) for output, case in zip(outputs, cases, strict=True) if output.finish_reason == "stop"]
    assert [wrong for output, case in finished if (wrong := problem(output, *case))] == []
    assert reasons["stop"] >= 0.95 * len(cases), reasons
