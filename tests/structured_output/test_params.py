"""StructuredOutputsParams: exactly one constraint, well formed."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import RequestError
from quire.sampling_params import SamplingParams
from quire.structured_outputs_params import GuidedDecodingParams, StructuredOutputsParams


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
        ({"json_object": False}, "json_object=false"),
        ({"choice": []}, "1 to"),
        ({"choice": ["a", ""]}, "empty"),
        ({"choice": "ab"}, "list of texts"),
        ({"regex": ""}, "empty"),
        ({"regex": 3}, "must be a text"),
        ({"json": '{"type":'}, "JSON object"),
        ({"json": "[]"}, "JSON object"),
        ({"json": {"const": "\ud800"}}, "cannot be written"),
        ({"json": {"const": "\ud83d\ude00"}}, "half a surrogate pair"),
        ({"json": "x" * 300_000}, "limited to"),
        ({"choice": ["x" * 3_000] * 100}, "choice is limited to 262144 bytes"),
        ({"regex": "x" * 300_000}, "limited to"),
        ({"structural_tag": {"format": {"type": "const_string", "value": "x" * 300_000}}}, "limited to"),
        ({"choice": ["a", "\ud800"]}, "half a surrogate pair"),
        ({"regex": "\ud800"}, "half a surrogate pair"),
        ({"grammar": 'start: "\ud800"'}, "half a surrogate pair"),
        ({"json": '{"const": "\\ud800"}'}, "half a surrogate pair"),
        ({"structural_tag": '{"format": {"type": "const_string", "value": "\\ud800"}}'}, "half a surrogate pair"),
        ({"json_object": True, "whitespace_pattern": "\ud800"}, "half a surrogate pair"),
        ({"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True}, "contradict"),
    ],
)
def test_what_is_not_one_constraint_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        StructuredOutputsParams(**given)
    assert caught.value.param == "structured_outputs"


def test_the_older_names_mean_the_same() -> None:
    older = SamplingParams(guided_decoding=GuidedDecodingParams(regex="a"))
    assert older == SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(RequestError, match="older name"):
        SamplingParams(
            guided_decoding=GuidedDecodingParams(regex="a"), structured_outputs=StructuredOutputsParams(regex="b")
        )
