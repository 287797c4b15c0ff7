"""Hands an engine's messages to the event loop.

A server's API process receives in its event loop, from a client whose messages a file descriptor announces. An engine
in the same process has no descriptor, so a thread waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from quire.engine.client import EngineClient, Lost
from quire.foundation.clock import Clock
from quire.foundation.messages.from_engine import Dead, Deltas, FromEngine
from quire.text.deltas import in_pieces

logger = logging.getLogger(__name__)

WAIT_S = 0.2
"""Seconds that one receive waits, and so how long closing may take."""
PIECE = 128
"""Sequences that one callback of the event loop hears about: each costs it up to a tenth of a millisecond."""


OnMessage = Callable[[FromEngine | Lost], None]
"""Called in the event loop."""


class Receiver(Protocol):
    """Hands an engine's messages to the event loop, in order."""

    @property
    def heard_at(self) -> float | None:
        """When the last message came, whether or not the event loop has seen it; None before the first."""

    def start(self) -> None:
        """Begin; called in the event loop."""

    async def close(self) -> None:
        """Return when the client is no longer used."""


MakeReceiver = Callable[[EngineClient, Clock, OnMessage], Receiver]


class PollableClient(EngineClient, Protocol):
    """An EngineClient that an event loop can wait for."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when there may be messages, and stays so until `receive` returns None."""


class EventLoopReceiver:
    """Receives in the event loop; a connection that breaks is a Dead.

    The callback that receives a step's message handles it. A thread that receives would be woken for each step beside
    the event loop, and both would wait for the interpreter's lock: a sixth of what a step of 16 streams costs.
    """

    def __init__(self, client: PollableClient, clock: Clock, on_message: OnMessage) -> None:
        self._client = client
        self._clock = clock
        self._on_message = on_message
        self._pieces: deque[FromEngine | Lost] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._going_on = False  # a callback will look for more
        self.heard_at: float | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._client.fileno(), self._on_readable)

    async def close(self) -> None:
        self._stop()
        self._pieces.clear()

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._client.fileno())
            self._loop = None

    def _on_readable(self) -> None:
        if not self._going_on:
            self._hand_over()

    def _hand_over(self) -> None:
        """Hand over the next piece. The rest waits for the loop's next turn, so that others run in between."""
        self._going_on = False
        if not self._has_next():
            return
        try:
            self._on_message(self._pieces.popleft())
        finally:
            if self._has_next():
                self._going_on = True
                asyncio.get_running_loop().call_soon(self._hand_over)

    def _has_next(self) -> bool:
        """Whether there is a piece; receives a message if none is left of the last one."""
        if self._pieces or self._loop is None:
            return bool(self._pieces)
        try:
            message = self._client.receive(0.0)
        except Exception as error:
            logger.exception("The connection to the engine broke.")
            message = Dead(type(error).__name__, source=self._client.engine)
            self._stop()
        if message is None:
            return False
        self.heard_at = self._clock.now()
        self._pieces += in_pieces(message, PIECE) if isinstance(message, Deltas) else [message]
        return True


class ThreadReceiver:
    """Receives in a thread; a connection that breaks is a Dead."""

    def __init__(self, client: EngineClient, clock: Clock, on_message: OnMessage) -> None:
        self._client = client
        self._clock = clock
        self._on_message = on_message
        self._closing = False
        self.heard_at: float | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="engine-messages", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        self._closing = True
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 10 * WAIT_S)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._closing:
            try:
                message = self._client.receive(WAIT_S)
            except Exception as error:
                logger.exception("The connection to the engine broke.")
                message, self._closing = Dead(type(error).__name__, source=self._client.engine), True
            if message is not None:
                self.heard_at = self._clock.now()
                pieces = in_pieces(message, PIECE) if isinstance(message, Deltas) else [message]
                with contextlib.suppress(RuntimeError):  # the loop is closed: all requests are over
                    for piece in pieces:
                        loop.call_soon_threadsafe(self._on_message, piece)
