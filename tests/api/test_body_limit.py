"""Bodies that are too large, alone or together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.errors import OverloadedError
from quire.serving.api.middleware import HELD_BODIES, RETRY_S, SMALL_BYTES, BodyLimitMiddleware

LARGE = SMALL_BYTES + 1


def scope(path: str = "/x") -> dict[str, Any]:
    return {"type": "http", "path": path, "headers": []}


async def send(message: Any) -> None:
    pass


def body(size: int) -> Any:
    """What a server's `receive` brings: a body in two parts."""
    parts = iter([(b"a" * (size - 1), True), (b"a", False)])

    async def receive() -> dict[str, Any]:
        data, more = next(parts)
        return {"type": "http.request", "body": data, "more_body": more}

    return receive


def test_large_bodies_are_refused_while_others_hold_too_much_and_small_ones_are_read() -> None:
    async def main() -> None:
        over = asyncio.Event()
        reading = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal reading
            while (await receive())["more_body"]:
                pass
            reading += 1
            await over.wait()

        limited = BodyLimitMiddleware(app, max_bytes=LARGE, larger={"/files": LARGE})
        held = [asyncio.ensure_future(limited(scope(), body(LARGE), send)) for _ in range(HELD_BODIES)]
        while reading < HELD_BODIES:
            await asyncio.sleep(0)
        with pytest.raises(OverloadedError) as refused:
            await limited(scope(), body(LARGE), send)
        assert (refused.value.status, refused.value.retry_after_s) == (429, RETRY_S)
        small = asyncio.ensure_future(limited(scope(), body(SMALL_BYTES), send))
        stored = asyncio.ensure_future(limited(scope("/files"), body(LARGE), send))
        while reading < HELD_BODIES + 2:
            await asyncio.sleep(0)
        over.set()
        await asyncio.gather(*held, small, stored)
        await limited(scope(), body(LARGE), send)  # nothing is held any more

    asyncio.run(main())
