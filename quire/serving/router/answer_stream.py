"""A server's answer on its way to the client: the bytes as they come, as fast as the client reads.

If an answer that has begun cannot be ended, the client's connection is closed in the middle, so that the client does
not take a part for the whole answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Scope, Send

from quire.foundation.http_client.address import Headers
from quire.foundation.http_client.answer_parser import HttpError
from quire.serving.api.http_server import BoundedHttpProtocol
from quire.serving.router.dispatch import Answer

SLOW_CLIENT_S = 30.0
_ABORT = "quire.abort"
"""Key in the scope's extensions, for the transport."""


class AnswerCutOff(Exception):
    """An answer that has begun cannot be ended: the client has to see its connection close in the middle."""


async def send_answer(answer: Answer, headers: Headers, send: Send, slow_client_s: float) -> None:
    """Send a whole answer to a client, which may leave a part unread for `slow_client_s` seconds.

    Raises:
        AnswerCutOff: The server failed, or the client does not read.
    """
    await send({"type": "http.response.start", "status": answer.head.status, "headers": headers})
    data = answer.first
    while data:
        try:
            async with asyncio.timeout(slow_client_s):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            raise AnswerCutOff("The client does not read.") from None
        try:
            data = await answer.read()
        except HttpError as error:
            raise AnswerCutOff(f"Server {answer.backend.address.url} failed: {error}") from error
    await send({"type": "http.response.body", "body": b""})


class RouterHttpProtocol(BoundedHttpProtocol):
    """One client's connection, which `abort` can close."""

    def on_headers_complete(self) -> None:
        extensions: dict[str, Any] = {_ABORT: {"transport": self.transport}}
        self.scope["extensions"] = extensions
        super().on_headers_complete()


async def abort(scope: Scope) -> None:
    """Close the client's connection at once."""
    scope["extensions"][_ABORT]["transport"].abort()
    await asyncio.sleep(0)  # until the HTTP server has noticed
