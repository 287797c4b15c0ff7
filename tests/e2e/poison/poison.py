"""One poison, and short ways to write one down."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
GENERATE, OLLAMA_CHAT, OLLAMA_GENERATE = "/inference/v1/generate", "/api/chat", "/api/generate"
JSON = {"Content-Type": "application/json"}
USER = [{"role": "user", "content": "a"}]


@dataclass(frozen=True)
class Poison:
    """One request.

    Attributes:
        allowed: The status codes that are right; 0 stands for a connection that is closed without an answer.
        body: Made when it is sent, because some are megabytes.
        wire: In place of all else: bytes that are sent as they are, part by part.
        pause_s: Between the parts.
        hang_up: Close the connection behind the last part, without reading.
    """

    name: str
    allowed: tuple[int, ...]
    path: str = COMPLETIONS
    body: Callable[[], bytes] = bytes
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)
    wire: Callable[[], list[bytes]] | None = None
    pause_s: float = 0.0
    hang_up: bool = False


def post(name: str, allowed: int | tuple[int, ...], path: str, make: Callable[[], Any], **options: Any) -> Poison:
    """A body that is made when it is needed: JSON, or bytes as they are."""

    def body() -> bytes:
        made = make()
        return made if isinstance(made, bytes) else json.dumps(made).encode()

    return Poison(name, (allowed,) if isinstance(allowed, int) else allowed, path, body, **options)


def wire(name: str, allowed: int | tuple[int, ...], *parts: bytes, **options: Any) -> Poison:
    """Bytes on a connection."""
    codes = (allowed,) if isinstance(allowed, int) else allowed
    return Poison(name, codes, wire=lambda: list(parts), **options)
