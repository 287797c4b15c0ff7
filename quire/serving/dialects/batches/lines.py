"""Lines of a batch's files: requests in, results out. The format is OpenAI's.

Knows nothing about where the lines are kept and who answers them.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.errors import RequestError
from quire.serving.api.request_body import decode_body

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Where a batch's requests may go."""
MAX_ID = 512
"""Characters of a custom_id."""
_MAX_VALUE_BYTES = 16 * MAX_ID
_LONG = object()
_NOTHING = msgspec.Raw(b"")


class BatchLineError(Exception):
    """A line is not a request. `code`, `message` and `param` are what OpenAI's batch error has.

    Attributes:
        custom_id: Of the line, if it has a valid one.
    """

    custom_id: str | None = None

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    body: bytes


@dataclass(frozen=True)
class BatchLine:
    """One request.

    Attributes:
        custom_id: The client's name for it, unique in its file.
        url: One of ENDPOINTS.
        body: A JSON object. What is in it, its endpoint checks.
    """

    custom_id: str
    url: str
    body: bytes

    def body_with_priority(self, priority: int) -> bytes:
        """The body with this priority, unless it has one of its own."""
        if _value(msgspec.json.decode(self.body, type=_Body).priority) is not None:
            return self.body
        begun = self.body.rstrip()[:-1]
        comma = b"" if begun.strip() == b"{" else b","
        return begun + comma + b'"priority":%d}' % priority  # of several fields of one name the last one counts


class _Line(msgspec.Struct):
    """A line of which nothing is decoded: a body may be large."""

    custom_id: msgspec.Raw = _NOTHING
    method: msgspec.Raw = _NOTHING
    url: msgspec.Raw = _NOTHING
    body: msgspec.Raw = _NOTHING


class _Body(msgspec.Struct):
    """What of a body is looked at before it is sent."""

    stream: msgspec.Raw = _NOTHING
    background: msgspec.Raw = _NOTHING
    priority: msgspec.Raw = _NOTHING


def parse_line(raw: bytes, endpoints: Collection[str], max_bytes: int | None = None) -> BatchLine:
    """A request from its line.

    Args:
        endpoints: Where it may go.
        max_bytes: How long it may be; None: it may have any length.

    Raises:
        BatchLineError: It is none.
    """
    if max_bytes is not None and len(raw) > max_bytes:
        raise BatchLineError(
            "payload_too_large", f"This line is too long: a request may have {max_bytes} bytes (--max-request-bytes)."
        )
    try:
        line = msgspec.json.decode(raw, type=_Line)
    except msgspec.ValidationError:
        raise BatchLineError("invalid_json_line", "This line is not a JSON object.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError):
        raise BatchLineError("invalid_json_line", _fault(raw)) from None
    custom_id, method, url = map(_value, (line.custom_id, line.method, line.url))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID:
        raise BatchLineError(
            "missing_required_parameter", f"custom_id must be a text of 1 to {MAX_ID} characters.", "custom_id"
        )
    try:
        if method not in (None, "POST"):
            raise BatchLineError("invalid_method", "method must be POST.", "method")
        if url not in endpoints:
            raise BatchLineError("invalid_url", f"url must be {' or '.join(sorted(endpoints))}.", "url")
        _check_body(body := bytes(line.body))
    except BatchLineError as error:
        error.custom_id = custom_id
        raise
    return BatchLine(custom_id, str(url), body)


def _fault(raw: bytes) -> str:
    """What is wrong with a line that is not JSON, in the words for a request's body."""
    try:
        decode_body(raw)
    except RequestError as error:
        return error.message.replace("The request body", "This line")
    return "This line is not valid JSON."


def _check_body(body: bytes) -> None:
    try:
        found = msgspec.json.decode(body, type=_Body)
    except msgspec.DecodeError:
        raise BatchLineError("missing_required_parameter", "body must be a JSON object.", "body") from None
    for name, value in (("stream", found.stream), ("background", found.background)):
        if _value(value):
            raise BatchLineError("invalid_request", f"{name} is not possible in a batch.", f"body.{name}")


def _value(raw: msgspec.Raw) -> Any:
    """A short value; `_LONG` stands for one that is too long to be meant, None for one that is not there."""
    if len(memoryview(raw)) > _MAX_VALUE_BYTES:
        return _LONG
    if not len(memoryview(raw)):
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
        raise BatchLineError("invalid_json_line", "This line is not valid JSON.") from None


def result_line(custom_id: str | None, request_id: str, answer: Answer, *, repeat_error: bool = False) -> bytes:
    """Write the line of the output file, or of the error file, about a request that was answered.

    Args:
        repeat_error: Let the body of a failed request also stand in `error`, as in vLLM's files.
    """
    body = msgspec.Raw(answer.body or b"null")
    response = {"status_code": answer.status, "request_id": request_id, "body": body}
    return _line(custom_id, response, body if repeat_error and answer.status != 200 else None)


def error_line(custom_id: str, code: str, message: str) -> bytes:
    """Write the line about a request that was not sent."""
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, str] | msgspec.Raw | None) -> bytes:
    name = f"batch_req_{uuid.uuid4().hex}"
    return msgspec.json.encode({"id": name, "custom_id": custom_id, "response": response, "error": error})
