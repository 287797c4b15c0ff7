"""A server's answer on its way to the client: the same bytes, part by part, as fast as the client reads."""

from __future__ import annotations

import asyncio

from starlette.types import Send

from quire.serving.router.answer_parser import BackendError
from quire.serving.router.dispatch import Answer
from quire.serving.router.routed_request import Headers

SLOW_CLIENT_S = 30.0


class AnswerCutOff(Exception):
    """An answer that had begun cannot be ended: the client has to see its connection close in the middle."""


async def send_answer(answer: Answer, headers: Headers, send: Send, slow_client_s: float) -> None:
    """Send all of it.

    Args:
        answer: Of a server.
        headers: For the client.
        send: The ASGI server's.
        slow_client_s: How long the client may leave a part unread.

    Raises:
        AnswerCutOff: The server failed, or the client reads nothing.
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
        except BackendError as error:
            raise AnswerCutOff(f"Server {answer.backend.address.url} failed: {error}") from error
    await send({"type": "http.response.body", "body": b""})
