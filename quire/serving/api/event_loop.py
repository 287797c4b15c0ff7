"""The event loop of an API process: it measures its callbacks, and shares connections with other processes.

Whatever runs in the loop keeps every stream waiting; `/metrics` shows how long. Processes that listen on one socket are
all woken for each connection, and uvloop even takes all that wait at once. Here a process takes one at a time, and a
process that has more than another lets that one go first for a moment. So one that is dead, stopped or busy delays
nobody for longer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextvars import Context
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, TypeVarTuple

import uvloop

from quire.engine.metrics.histogram import WorkTimes
from quire.foundation.processes.shared_memory import SharedNumbers

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

logger = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")

AIM_S = 0.02
"""A callback of more processor time is named in the log, if it is much longer than all before."""
WARNED_S = 0.1
"""A callback of more processor time is a warning."""
_LONGER = 1.25
_SHORT_S = 1e-3
"""Callbacks that take no longer by the wall clock are counted by it: that is an upper bound, and the first bucket's."""
_STALE_S = 5e-4
"""Maximum age of the last reading of the thread's clock. Reading it is a system call, so not done for each callback."""
AHEAD = 2
"""A process with up to this many more connections than another one does not wait for it."""
YIELD_S = 0.002
"""How long others may go first: a connection's longest wait for a process that does not take it."""
RETRY_S = 1.0
"""Seconds until the next try after no connection could be accepted, for want of descriptors or memory."""


class CallbackTimes:
    """Counts processor times of callbacks in `times`, correct to half a millisecond."""

    def __init__(self, times: WorkTimes) -> None:
        self._times = times
        self._wall = self._processor = 0.0  # read at the same moment

    def run(self, callback: Callable[[*Ts], object], *arguments: *Ts) -> None:
        begun = perf_counter()
        if begun - self._wall > _STALE_S:
            self._processor, self._wall = thread_time(), begun
        try:
            callback(*arguments)
        finally:
            took = perf_counter() - begun
            if took > _SHORT_S:
                took = min(took, thread_time() - self._processor)
                self._wall = 0.0
            longest = self._times.longest
            self._times.observe(took)
            if took > max(_LONGER * longest, AIM_S):
                level = logging.WARNING if took > WARNED_S else logging.INFO
                logger.log(level, "%s held the event loop for %.0f ms.", _name(callback), took * 1e3)


class MeasuredLoop(uvloop.Loop):
    """uvloop, with each callback measured. BoundedHttpProtocol measures what uvloop calls by itself."""

    def __init__(self, times: WorkTimes) -> None:
        super().__init__()
        self.callback_times = CallbackTimes(times)

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(self.callback_times.run, callback, *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon_threadsafe(self.callback_times.run, callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_later(delay, self.callback_times.run, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self.callback_times.run, callback, *args, context=context)

    def add_reader(self, fd: FileDescriptorLike, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        super().add_reader(fd, self.callback_times.run, callback, *args)


def _name(callback: Callable[..., object]) -> str:
    """The name of what a callback runs: of a task's step, its coroutine."""
    owner = getattr(callback, "__self__", None)
    what = owner.get_coro() if isinstance(owner, asyncio.Task) else callback
    return str(getattr(what, "__qualname__", what))


class SharingLoop(MeasuredLoop):
    """A MeasuredLoop that shares connections; `open_connections` has how many each process has."""

    def __init__(self, times: WorkTimes, open_connections: SharedNumbers) -> None:
        super().__init__(times)
        self._open_connections = open_connections

    async def create_server(  # type: ignore[override]
        self,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        *,
        sock: socket.socket,
        ssl: ssl.SSLContext | None = None,
        backlog: int = 0,
    ) -> Acceptor:
        """Serve the connections of a socket that listens already."""
        return Acceptor(self, sock, make_protocol, ssl, self._open_connections)


class Acceptor:
    """Takes connections from a listening socket until it is closed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        ssl: ssl.SSLContext | None,
        open_connections: SharedNumbers,
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._make_protocol = make_protocol
        self._ssl = ssl
        self._open = open_connections
        self._connecting: set[asyncio.Task[Any]] = set()
        self._later: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        loop.add_reader(listener, self._on_readable)

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        if self._later is not None:
            self._later.cancel()

    async def wait_closed(self) -> None:
        """Return at once: connections that were accepted go on without the acceptor."""

    def _on_readable(self) -> None:
        if self._open.own <= self._open.least_other + AHEAD:
            self._accept()
        else:
            self._wait(YIELD_S)

    def _wait(self, seconds: float) -> None:
        """Leave the next connection to other processes for some seconds, and take it then if it is still there."""
        self._loop.remove_reader(self._listener)
        self._later = self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._loop.add_reader(self._listener, self._on_readable)
        self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process was faster, or the client has gone
        except OSError as error:
            logger.error("No connection can be taken: %s.", error)
            self._wait(RETRY_S)
            return
        self._open.own += 1
        connection.setblocking(False)
        task = self._loop.create_task(self._serve(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _serve(self, connection: socket.socket) -> None:
        protocol = self._make_protocol()
        on_lost = protocol.connection_lost

        def connection_lost(error: Exception | None) -> None:
            self._open.own -= 1
            on_lost(error)

        protocol.connection_lost = connection_lost  # type: ignore[method-assign,assignment]
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._ssl)
        except OSError as error:  # ssl.SSLError is one; the protocol hears nothing of it
            logger.debug("A connection was not made: %s.", error)
            self._open.own -= 1
            connection.close()
