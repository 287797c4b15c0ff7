"""The requests of a batch: lines of its files in OpenAI's format, and answering them with the server's own
endpoints."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from quire.errors import RequestError
from quire.foundation.config import SchedulerConfig
from quire.serving.api.auth import TENANT
from quire.serving.api.request_body import decode_body
from quire.serving.api.schemas.queue_fields import MAX_PRIORITY
from quire.serving.api.session.session import EngineSession

ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank", "/score",
    "/rerank", "/v2/rerank", "/v2/embed", "/classify", "/pooling",
)  # fmt: skip
"""Where a batch's requests may go."""
MAX_ID = 512
"""Maximum number of characters of a custom_id."""
_MAX_VALUE_BYTES = 16 * MAX_ID
_LONG = object()
_NOTHING = msgspec.Raw(b"")
LOOK_AGAIN_S = 0.01
RETRY_S = 0.5
_AGAIN = (429, 503)
"""Statuses of a server that takes no work now, or has too much of it: the request is sent again later."""


class BatchLineError(Exception):
    """A line is not a request: OpenAI's `code`, `message` and `param`, and the `custom_id` if it is valid."""

    custom_id: str | None = None

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes


@dataclass(frozen=True)
class BatchLine:
    """One request: the client's name for it, one of ENDPOINTS, and a JSON object that the endpoint checks."""

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
    """The fields of a body that are looked at before it is sent."""

    stream: msgspec.Raw = _NOTHING
    background: msgspec.Raw = _NOTHING
    priority: msgspec.Raw = _NOTHING


def parse_line(raw: bytes, endpoints: Collection[str], max_bytes: int | None = None) -> BatchLine:
    """A request to one of these endpoints from its line; raises BatchLineError if it is none, or has more than
    `max_bytes`."""
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
    """A short value; None for one that is not there, `_LONG` for one that is too long to be meant."""
    if len(memoryview(raw)) > _MAX_VALUE_BYTES:
        return _LONG
    if not len(memoryview(raw)):
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
        raise BatchLineError("invalid_json_line", "This line is not valid JSON.") from None


def result_line(custom_id: str | None, request_id: str, answer: Answer, *, repeat_error: bool = False) -> bytes:
    """Write the line about a request that was answered, for the output file or the error file.

    With `repeat_error`, the body of a failed request also stands in `error`, as in vLLM's files.
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


class BatchCalls:
    """Sends requests to an application without a socket, with the first of its API keys, while there is room for them.

    A batch may fill a `share` of the sequences that run at once: interactive requests always find the rest. Where there
    are none, more than 1 keeps some waiting, so that none has to be waited for.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        session: EngineSession,
        scheduler: SchedulerConfig,
        share: float = 0.5,
    ) -> None:
        self._app = app
        self._headers = [(b"content-type", b"application/json")]
        if keys:
            self._headers.append((b"authorization", b"Bearer " + keys[0].encode()))
        self._session = session
        self._most = max(1, int((scheduler.max_num_seqs or 1) * share))
        self._has_priorities = scheduler.scheduling_policy == "priority"
        self._slots = asyncio.Semaphore(self._most)

    async def wait_for_room(self) -> None:
        """Wait until one more request may be sent, and take a slot, which `answer` gives back."""
        await self._slots.acquire()
        try:
            while self._session.num_sequences >= self._most:
                await asyncio.sleep(LOOK_AGAIN_S)
        except BaseException:
            self._slots.release()
            raise

    async def answer(self, line: BatchLine, tenant: str = "") -> tuple[str, Answer]:
        """Answer a request of a tenant, and free its slot. Returns the id that the request got, and the answer."""
        request_id = f"batch-{uuid.uuid4().hex}"
        try:
            body = line.body_with_priority(MAX_PRIORITY) if self._has_priorities else line.body
            while True:
                answer = await self._post(line.url, body, request_id, tenant)
                if answer.status not in _AGAIN and self._session.state != "dead":
                    return request_id, answer
                await asyncio.sleep(RETRY_S)
        finally:
            self._slots.release()

    async def _post(self, path: str, body: bytes, request_id: str, tenant: str) -> Answer:
        headers = [*self._headers, (b"x-request-id", request_id.encode()), (b"content-length", b"%d" % len(body))]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers,
            "client": None, "server": None, "state": {TENANT: tenant},
        }  # fmt: skip
        unsent: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        status, parts = 0, list[bytes]()

        async def receive() -> Message:
            if unsent:
                return unsent.pop()
            await asyncio.Event().wait()  # this client never disconnects
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return Answer(status, b"".join(parts))
