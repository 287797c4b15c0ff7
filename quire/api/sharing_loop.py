"""An event loop whose listening socket is that of other processes, too: connections go to whoever has time.

uvloop takes all connections that wait, however many: of a crowd that comes at once one process would get most. Here a
process takes one, lets its other callbacks run, and looks again; one that is busy comes less often, and one that is
stopped takes none. Knows nothing about HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from quire.api.measured_loop import MeasuredLoop

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""After no connection could be taken, for want of descriptors or memory."""


class SharingLoop(MeasuredLoop):
    """A MeasuredLoop that takes connections one by one."""

    async def create_server(  # type: ignore[override]
        self,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        *,
        sock: socket.socket,
        ssl: ssl.SSLContext | None = None,
        backlog: int = 0,
    ) -> Acceptor:
        """Serve the connections of a socket that listens already."""
        return Acceptor(self, sock, make_protocol, ssl)


class Acceptor:
    """Takes connections from a listening socket until it is closed.

    Args:
        loop: Where.
        listener: The socket.
        make_protocol: For each connection.
        ssl: How connections are encrypted; None: they are not.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        ssl: ssl.SSLContext | None,
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._make_protocol = make_protocol
        self._ssl = ssl
        self._connecting: set[asyncio.Task[Any]] = set()
        self._retry: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._begin()

    def close(self) -> None:
        """Take no more."""
        self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()

    async def wait_closed(self) -> None:
        """Those that were taken are no concern of this."""

    def _begin(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process was faster, or the client has gone
        except OSError as error:
            logger.error("No connection can be taken: %s.", error)
            self._loop.remove_reader(self._listener)
            self._retry = self._loop.call_later(RETRY_S, self._begin)
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._serve(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection, ssl=self._ssl)
        except OSError as error:  # ssl.SSLError is one
            logger.debug("A connection was not made: %s.", error)
            connection.close()
