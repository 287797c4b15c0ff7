"""What holds answers against the types of others sees what is wrong with one, and knows every route of theirs."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.api.answer_recorder import Answer
from tests.api.answer_types import KINDS, problems
from tests.api.server import Server

COMPLETION: dict[str, Any] = {
    "id": "a", "object": "text_completion", "created": 1, "model": "tiny",
    "choices": [{"index": 0, "text": "b", "finish_reason": "length", "logprobs": None, "stop_reason": None}],
}  # fmt: skip
UNTYPED = {
    "DELETE /v1/responses/{}", "GET /api/version", "GET /v1/files/{}/content", "POST /v1/chat/completions/render",
    "POST /v1/completions/render", "POST /v1/load_lora_adapter", "POST /v1/rerank", "POST /v1/score",
    "POST /v1/unload_lora_adapter",
}  # fmt: skip
"""Routes that begin as OpenAI's or Ollama's do, and for which no package here has types."""


def found(body: Any, path: str = "/v1/completions", kind: str = "application/json", status: int = 200) -> str:
    text = body if isinstance(body, str) else json.dumps(body)
    return "\n".join(problems([Answer("POST", path, status, kind, True, bytearray(text.encode()))]))


def test_a_field_that_is_missing_unknown_or_of_another_type_is_found() -> None:
    assert found(COMPLETION) == ""
    assert "created" in found({name: value for name, value in COMPLETION.items() if name != "created"})
    assert "created" in found({**COMPLETION, "created": "1"})
    assert "unknown fields: {'Completion.extra'}" in found({**COMPLETION, "extra": 1})
    assert "message" in found({"error": {"type": "x", "param": None, "code": None}}, status=400)


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        ("/v1/completions", 'data: {"choices": []}\n\n'),
        ("/v1/responses", 'event: response.created\ndata: {"type": "response.queued"}\n\n'),
        ("/v1/responses", 'event: response.output_text.delta\ndata: {"type": "response.output_text.delta"}\n\n'),
        ("/v1/messages", 'event: message_start\ndata: {"type": "message_start", "message": {}}\n\n'),
    ],
)
def test_each_event_is_checked(path: str, stream: str) -> None:
    assert found("data: [DONE]\n\n", kind="text/event-stream") == ""
    assert found(stream, path, "text/event-stream")


def test_every_route_that_others_have_is_checked(server: Server) -> None:
    document = server.get("/openapi.json").json()
    routes = {
        f"{method.upper()} {re.sub(r'{.*?}', '{}', path)}"
        for path, methods in document["paths"].items()
        for method in methods
        if path.startswith(("/v1/", "/api/"))
    }
    assert routes - UNTYPED == set(KINDS)
