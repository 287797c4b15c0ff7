"""Structured output of the built-in model, offline."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.errors import RequestError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=512, max_num_seqs=16) as llm:
        yield llm


def params(n: int = 1, **asked: Any) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=200, seed=3, structured_outputs=StructuredOutputsParams(**asked))


def test_every_kind_shapes_its_own_output_in_one_batch(llm: LLM) -> None:
    asked = [
        params(json=SCHEMA, n=4),
        params(regex=r"[0-9]{3}-[a-f]{2,5}"),
        params(choice=["left", "right"]),
        params(json=json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4})),
        SamplingParams(max_tokens=8, ignore_eos=True),
    ]
    outputs = llm.generate(["Tom is"] * len(asked), asked, use_tqdm=False)
    for choice in outputs[0].outputs:
        jsonschema.validate(json.loads(choice.text), SCHEMA)
        assert choice.finish_reason == "stop"
    assert len({choice.text for choice in outputs[0].outputs}) > 1
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2,5}", outputs[1].outputs[0].text)
    assert outputs[2].outputs[0].text in ("left", "right")
    assert 2 <= len(json.loads(outputs[3].outputs[0].text)) <= 4
    assert outputs[4].outputs[0].finish_reason == "length"


def test_a_conversation_may_be_answered_in_json(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "Who is Tom?"}], params(json=SCHEMA), use_tqdm=False)
    jsonschema.validate(json.loads(output.outputs[0].text), SCHEMA)


def test_a_refused_schema_is_a_request_error_and_the_next_call_works(llm: LLM) -> None:
    with pytest.raises(RequestError, match="'uniqueItems'"):
        llm.generate(["a", "b"], [params(choice=["x"]), params(json={"uniqueItems": True})], use_tqdm=False)
    (output,) = llm.generate("a", params(choice=["x"]), use_tqdm=False)
    assert output.outputs[0].text == "x"
