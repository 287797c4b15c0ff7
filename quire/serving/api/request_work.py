"""How the work for one request shares the event loop with others, and ends when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from quire.errors import RequestError

T = TypeVar("T")

PIECE_S = 5e-3
"""Seconds that a task may work before it lets others run; one step of it comes on top."""

MANY = 256
"""Maximum number of messages or items that are converted in the event loop; more are converted in a thread."""
MAX_TOKENS = 2**22
"""Maximum number of tokens of all prompts that are made of one request."""
CLIENT_CLOSED_REQUEST = 499
"""Status of a response to a client that has disconnected (nginx's number)."""


def check_total(tokens: int, param: str) -> None:
    """Raises a RequestError if a request whose field `param` is used several times becomes so many tokens that they
    take too much memory."""
    if tokens > MAX_TOKENS:
        raise RequestError(
            f"This request becomes {tokens} tokens in all. This server takes at most {MAX_TOKENS} at once: send "
            "several requests.",
            param=param,
        )


async def convert(number: int, work: Callable[[], T]) -> T:
    """The result of `work` on so many messages or items; much work is done in a thread."""
    return work() if number <= MANY else await asyncio.to_thread(work)


class TimeSlice:
    """The time that a task holds the event loop. Between steps of its work, the task offers the loop to others."""

    def __init__(self) -> None:
        self._begun = perf_counter()

    async def offer(self) -> None:
        """Let others run, if this task has held the loop for long."""
        if perf_counter() - self._begun > PIECE_S:
            await asyncio.sleep(0)
            self._begun = perf_counter()


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` makes. When the client disconnects first, `work` is cancelled."""
    response = await run_until_disconnect(work, request.receive)
    return response or Response(status_code=CLIENT_CLOSED_REQUEST)


async def run_until_disconnect(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """The result of `work`, or None when the client disconnects first; `work` is cancelled then."""
    working = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_listen_for_disconnect(receive))
    tasks: tuple[asyncio.Future[Any], ...] = (working, disconnected)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        del working, tasks, task  # an error refers to this frame: as a cycle, all that was sent awaits a search


async def _listen_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
