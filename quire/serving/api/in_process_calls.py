"""Requests that the server sends to its own endpoints, without a socket. Batches are made of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message

from quire.serving.api.request_head import TENANT


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    body: bytes


class InProcessCalls:
    """Posts JSON to an application.

    Args:
        app: The application.
        keys: Its API keys; the first one is sent along.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._headers = [(b"content-type", b"application/json")]
        if keys:
            self._headers.append((b"authorization", b"Bearer " + keys[0].encode()))

    async def post(self, path: str, body: bytes, request_id: str, tenant: str = "") -> Answer:
        """The answer to a request; when this is cancelled, so is the work for it.

        Args:
            path: Of the endpoint.
            request_id: Sent as X-Request-Id.
            tenant: Whose request it is, see Caller.
        """
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
