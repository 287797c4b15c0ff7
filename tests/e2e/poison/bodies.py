"""Bodies that are no JSON, or JSON of another shape, on every endpoint that reads one."""

from __future__ import annotations

from tests.e2e.poison.poison import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    RESPONSES,
    Poison,
    post,
)

ENDPOINTS = (
    COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE, OLLAMA_CHAT, OLLAMA_GENERATE, "/v1/messages/count_tokens",
    "/v1/responses/input_tokens", "/tokenize", "/detokenize", "/v1/chat/completions/batch", "/invocations",
    "/v1/chat/completions/render", "/v1/completions/render", "/v1/batches", "/v1/embeddings", "/pooling", "/classify",
    "/score", "/rerank", "/v2/embed", "/api/embed", "/api/embeddings", "/v1/decisions",
)  # fmt: skip
WRONG = {
    "nothing": b"",
    "cut off": b'{"prompt": "a", "messages": [{"role": "us',
    "not a number": b'{"prompt": "a", "messages": [], "temperature": NaN}',
    "half a surrogate": b'{"prompt": "\\ud800", "input": "\\udfff", "messages": "\\ud83d"}',
    "bytes that are no text": b'{"prompt": "\xff\xfe\x80"}',
    "a list": b"[1, 2, 3]",
    "too deep": b'{"x": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "a field nobody knows": b'{"\\u0000 \\u202e": {"a": [null]}}',
}

BODIES: list[Poison] = [
    post(f"{name} to {path}", 400, path, lambda body=body: body)  # type: ignore[misc]
    for path in ENDPOINTS
    for name, body in WRONG.items()
]
