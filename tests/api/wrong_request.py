"""A wrong request and the exact answer that it must get; and short ways to write one down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class WrongRequest:
    """One request and its answer.

    Attributes:
        message: The whole error message; with `…` at its end, the beginning of it.
        param: The field that is named.
    """

    name: str
    body: bytes
    status: int
    message: str
    param: str | None = None
    method: str = "POST"
    path: str = "/v1/completions"
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)

    def matches(self, message: str) -> bool:
        """Whether the server said the right thing."""
        if self.message.endswith("…"):
            return message.startswith(self.message[:-1])
        return message == self.message


def completion(name: str, message: str, param: str | None = None, status: int = 400, **fields: Any) -> WrongRequest:
    return WrongRequest(name, json.dumps({"prompt": "a"} | fields).encode(), status, message, param)


def chat(name: str, message: str, param: str | None = None, status: int = 400, **fields: Any) -> WrongRequest:
    body = {"messages": [{"role": "user", "content": "a"}]} | fields
    return WrongRequest(name, json.dumps(body).encode(), status, message, param, path="/v1/chat/completions")


def raw(name: str, body: bytes, message: str, status: int = 400, **options: Any) -> WrongRequest:
    return WrongRequest(name, body, status, message, **options)


def unsupported(name: str, value: Any, advice: str = "leave it out") -> WrongRequest:
    return chat(f"unsupported {name}", f"'{name}' is not supported yet: {advice}.", name, **{name: value})


BAD_JSON = "The request body is not valid JSON"
