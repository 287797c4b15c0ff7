"""Lines of a batch's files: requests in, results out. The format is OpenAI's.

Knows nothing about where the lines are kept and who answers them.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.api.in_process_calls import Answer
from quire.api.request_body import decode_body
from quire.errors import RequestError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Where a batch's requests may go."""
MAX_ID = 512
"""Characters of a custom_id."""


class BatchLineError(Exception):
    """A line is not a request. `code`, `message` and `param` are what OpenAI's batch error has."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


@dataclass(frozen=True)
class BatchLine:
    """One request.

    Attributes:
        custom_id: The client's name for it, unique in its file.
        url: One of ENDPOINTS.
        body: Its JSON.
    """

    custom_id: str
    url: str
    body: dict[str, Any]


def parse_line(raw: bytes, endpoints: Collection[str]) -> BatchLine:
    """A request from its line.

    Args:
        endpoints: Where it may go.

    Raises:
        BatchLineError: It is none.
    """
    try:
        line = decode_body(raw)
    except RequestError as error:
        raise BatchLineError("invalid_json_line", error.message.replace("The request body", "This line")) from None
    custom_id, method, url, body = (line.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID:
        raise BatchLineError(
            "missing_required_parameter", f"custom_id must be a text of 1 to {MAX_ID} characters.", "custom_id"
        )
    if method not in (None, "POST"):
        raise BatchLineError("invalid_method", "method must be POST.", "method")
    if url not in endpoints:
        raise BatchLineError("invalid_url", f"url must be {' or '.join(sorted(endpoints))}.", "url")
    if not isinstance(body, dict):
        raise BatchLineError("missing_required_parameter", "body must be a JSON object.", "body")
    if body.get("stream"):
        raise BatchLineError("invalid_request", "stream is not possible in a batch.", "body.stream")
    if body.get("background"):
        raise BatchLineError("invalid_request", "background is not possible in a batch.", "body.background")
    return BatchLine(custom_id, str(url), body)


def result_line(custom_id: str, request_id: str, answer: Answer) -> bytes:
    """The line of the output file, or of the error file, about a request that was answered."""
    response = {"status_code": answer.status, "request_id": request_id, "body": msgspec.Raw(answer.body or b"null")}
    return _line(custom_id, response, None)


def run_batch_line(custom_id: str, request_id: str, answer: Answer) -> bytes:
    """The same in the one output file of `quire run-batch`, where `error` tells failed requests apart, as in vLLM's."""
    body = msgspec.Raw(answer.body or b"null")
    response = {"status_code": answer.status, "request_id": request_id, "body": body}
    return _line(custom_id, response, None if answer.status == 200 else body)


def error_line(custom_id: str, code: str, message: str) -> bytes:
    """The line about a request that was not sent."""
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | msgspec.Raw | None) -> bytes:
    name = f"batch_req_{uuid.uuid4().hex}"
    return msgspec.json.encode({"id": name, "custom_id": custom_id, "response": response, "error": error})
