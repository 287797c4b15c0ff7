"""An event loop whose listening socket is that of other processes, too: each takes a fair share of the connections.

All that listen are woken for each connection, and without more the same one would always be first; uvloop even takes
all that wait at once. Here a process takes one at a time, and one that has more than another lets that one go first for
a moment. So a process that is dead, stopped or busy delays nobody for longer than that. Knows nothing about HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from quire.engine.metrics.histogram import WorkTimes
from quire.foundation.processes.shared_numbers import SharedNumbers
from quire.serving.api.measured_loop import MeasuredLoop

logger = logging.getLogger(__name__)

AHEAD = 2
"""A process with up to this many more connections than another one does not wait for it."""
YIELD_S = 0.002
"""How long others may go first: a connection's longest wait for a process that does not take it."""
RETRY_S = 1.0
"""Seconds until the next try after no connection could be accepted, for want of descriptors or memory."""


class SharingLoop(MeasuredLoop):
    """A MeasuredLoop that shares connections.

    Args:
        times: See MeasuredLoop.
        open_connections: How many each process has.
    """

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
    """Takes connections from a listening socket until it is closed.

    Args:
        loop: Serves the connections.
        listener: The socket.
        make_protocol: Makes the protocol of each connection.
        ssl: How connections are encrypted; None: they are not.
        open_connections: How many each process has.
    """

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
        """Accept no more connections."""
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
