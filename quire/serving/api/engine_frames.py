"""The live picture of the engines for all who look at it: one frame for all of them, and none when nobody looks.

Owns when engines are asked for frames, how many may look, and that every stream ends. Knows nothing about what the page
makes of a frame.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from quire.errors import OverloadedError, QuireError
from quire.foundation.messages.to_engine import CLIENT_SHIFT
from quire.serving.api.session.session import EngineSession

logger = logging.getLogger(__name__)

FRAME_S = 0.5
MAX_VIEWERS = 16
ANSWER_S = 5.0
"""An engine that does not answer for so long, in a long step perhaps, is left out of a frame."""
RETRY_AFTER_S = 10
_ENDED = ("draining", "dead")


class EngineFrames:
    """Asks all engines for a frame every FRAME_S as long as somebody looks.

    Args:
        session: To the engines.
    """

    def __init__(self, session: EngineSession) -> None:
        self._session = session
        self._viewers: set[FrameStream] = set()
        self._asking: asyncio.Task[None] | None = None

    def view(self) -> FrameStream:
        """A new viewer's stream, to be closed at its end.

        Raises:
            OverloadedError: MAX_VIEWERS look already.
        """
        if len(self._viewers) >= MAX_VIEWERS:
            raise OverloadedError(
                f"{MAX_VIEWERS} pages look at the engine already. Close one, or look again later.",
                retry_after_s=RETRY_AFTER_S,
            )
        stream = FrameStream(self._leave)
        self._viewers.add(stream)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask())
        return stream

    def _leave(self, stream: FrameStream) -> None:
        self._viewers.discard(stream)
        if not self._viewers and self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def _ask(self) -> None:
        """Until nobody looks, or the server comes to its end."""
        numbers: dict[int, int] = {}  # of each engine's last frame
        shown = ""
        try:
            while (state := self._session.state) not in _ENDED:
                engines = await self._new_frames(numbers)
                if engines or state != shown:
                    self._show(_event("frame", picture({"state": state, "engines": engines})))
                shown = state
                await asyncio.sleep(FRAME_S)
        except Exception:
            logger.exception("The live picture ends.")
        self._show(_event("end", msgspec.json.encode({"state": self._session.state})), last=True)

    def _show(self, data: bytes, *, last: bool = False) -> None:
        for stream in self._viewers:
            stream.show(data, last=last)

    async def _new_frames(self, numbers: dict[int, int]) -> list[dict[str, Any]]:
        """Of the engines that have a newer one than that of `numbers`, which is brought up to date."""
        all_stats = self._session.stats.engines
        asked = await asyncio.gather(
            *(self._ask_one(stats.engine, numbers.get(stats.engine, 0)) for stats in all_stats)
        )
        engines: list[dict[str, Any]] = []
        for stats, value in zip(all_stats, asked, strict=True):
            if "counts" in value:
                numbers[stats.engine] = value["number"]
                engines.append({"engine": stats.engine, "generated_tokens": stats.generation_tokens, **value})
        return engines

    async def _ask_one(self, engine: int, seen: int) -> dict[str, Any]:
        try:
            async with asyncio.timeout(ANSWER_S):
                return (await self._session.control_one(engine, "frame", {"seen": str(seen)})).value
        except (QuireError, TimeoutError):
            return {}


class FrameStream:
    """One viewer's server-sent events; the Writer of a StreamResponse. A viewer that reads slowly misses frames."""

    media_type = "text/event-stream"

    def __init__(self, leave: Callable[[FrameStream], None]) -> None:
        self.finished = False
        self._leave = leave
        self._news = asyncio.Event()
        self._data = b""
        self._last = False

    def show(self, data: bytes, *, last: bool) -> None:
        """The newest event, in place of one that was not read."""
        self._data, self._last = data, last
        self._news.set()

    async def wait(self) -> None:
        """The response begins at once."""

    async def next(self, write_now: Callable[[bytes], bool]) -> bytes:
        """The next event."""
        await self._news.wait()
        self._news.clear()
        self.finished = self._last
        return self._data

    def close(self) -> None:
        """Nobody looks any more."""
        self._leave(self)


def picture(frame: dict[str, Any]) -> bytes:
    """A frame as JSON. Ids of requests become texts, because JavaScript has no integers of 64 bits."""
    for engine in frame["engines"]:
        for rows in (engine["running"], engine["waiting"]):
            rows["id"] = [_name(number) for number in rows["id"]]
        engine["tables"] = [(_name(number), first, blocks) for number, first, blocks in engine["tables"]]
    return msgspec.json.encode(frame)


def _name(number: int) -> str:
    client, sequence = number >> CLIENT_SHIFT, number & ((1 << CLIENT_SHIFT) - 1)
    return f"{client}.{sequence}"


def _event(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
