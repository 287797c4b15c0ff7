"""What the OpenAPI document says about ranges is what the server checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire.serving.openapi_document import RANGES
from tests.api.server import Server

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
DETECTION = {"max_pattern_size": 8}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "input": ("/v1/responses", {"max_output_tokens": 1}),
    "length_penalty": ("/v1/completions", {"prompt": "a", "max_tokens": 1, "use_beam_search": True}),
    "logprobs": ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    "max_completion_tokens": ("/v1/chat/completions", {"messages": CHAT["messages"]}),
    "stop_sequences": ("/v1/messages", CHAT),
    "token_ids": ("/inference/v1/generate", {"sampling_params": {"max_tokens": 1}}),
    "tokens": ("/detokenize", {}),
    "top_logprobs": ("/v1/chat/completions", CHAT | {"logprobs": True}),
}
"""Where a field is tried; else in a chat."""
FOR_SOME = ("input", "logprobs", "priority", "prompt_logprobs", "timeout")
"""Fields whose ends are for some servers or routes only."""


def outside(kind: str, keywords: dict[str, Any]) -> Iterator[Any]:
    """Values that are just outside of the range."""
    step = 1 if kind == "integer" else 0.01
    match kind:
        case "integer" | "number":
            if "minimum" in keywords:
                yield keywords["minimum"] - step
            if "exclusiveMinimum" in keywords:
                yield keywords["exclusiveMinimum"]
            if "maximum" in keywords:
                yield keywords["maximum"] + step
        case "string":
            if "minLength" in keywords:
                yield ""
            if keywords.keys() & {"maxLength", "pattern"}:
                yield "ä" * (keywords.get("maxLength", 128) + 1)
        case "object":
            yield {"x": 1}
        case "array":
            items = keywords.get("items", {})
            if "minItems" in keywords:
                yield []
            if "minimum" in items:
                yield [items["minimum"] - 1]
            if "maxItems" in keywords:
                yield [fitting(items)] * (keywords["maxItems"] + 1)
            if "maxLength" in items:
                yield ["x" * (items["maxLength"] + 1)]


def inside(kind: str, keywords: dict[str, Any]) -> Iterator[Any]:
    """Values at its ends."""
    match kind:
        case "integer" | "number":
            yield from (keywords[name] for name in ("minimum", "maximum") if name in keywords)
            if "exclusiveMinimum" in keywords:
                yield 0.01
        case "string":
            yield "x" * min(keywords.get("maxLength", 128), 128)
        case "object":
            yield {"5": 1}
        case "array":
            yield [fitting(keywords.get("items", {}))]


def fitting(items: dict[str, Any]) -> Any:
    if "role" in str(items) or "$ref" in items:
        return CHAT["messages"][0]
    return 5 if "minimum" in items else "x" * min(items.get("maxLength", 1), 9)


def refused(server: Server, name: str, value: Any) -> bool:
    """Whether the value is refused, and by the field's name."""
    path, body = BODIES.get(name, ("/v1/chat/completions", CHAT))
    if name in ("max_pattern_size", "min_pattern_size", "min_count"):
        body = body | {"repetition_detection": {"max_pattern_size": 1024, name: value}}
    else:
        body = body | {name: value}
    answer = server.post(path, body)
    assert answer.status_code in (200, 400), answer.text
    error = answer.json().get("error") or {}
    return answer.status_code == 400 and name in f"{error['message']} {error.get('param')}"


def items_of(name: str, keywords: dict[str, Any]) -> dict[str, Any]:
    return keywords | ({"items": {"$ref": "message"}} if name == "messages" else {})


@pytest.mark.parametrize("name", RANGES)
def test_a_documented_range_is_the_one_that_is_checked(server: Server, name: str) -> None:
    for kind, keywords in RANGES[name].items():
        for value in outside(kind, items_of(name, keywords)):
            assert refused(server, name, value), value
        for value in inside(kind, items_of(name, keywords)) if name not in FOR_SOME else ():
            assert not refused(server, name, value), value


def test_bodies_are_closed_and_know_what_is_ignored(server: Server) -> None:
    schemas = server.get("/openapi.json").json()["components"]["schemas"]
    chat = schemas["ChatRequest"]
    assert chat["additionalProperties"] is False
    assert chat["properties"]["user"] == {"description": "Ignored."}
    assert {"type": "number", "minimum": 0} in chat["properties"]["temperature"]["anyOf"]
    temperatures = [schemas[name]["properties"]["temperature"]["anyOf"] for name in ("ChatRequest", "ResponsesRequest")]
    assert temperatures[0] == temperatures[1]
