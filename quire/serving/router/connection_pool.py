"""Connections to one server, kept open between requests. Owns their number and age, nothing of what is sent."""

from __future__ import annotations

import asyncio
import ssl

from quire.errors import ConfigError, reason
from quire.serving.router.answer_parser import BackendError
from quire.serving.router.backend_connection import BackendConnection
from quire.serving.router.backend_list import BackendAddress

CONNECT_S = 5.0
IDLE_S = 15.0
"""A connection that was idle for longer is not used again: the server may be about to close it."""
MAX_IDLE = 256


def backend_tls(ca_certs: str | None) -> ssl.SSLContext:
    """How servers prove who they are: by certificates for the names under which they are listed.

    Args:
        ca_certs: File of the certificates that these must come from; None: the system's.

    Raises:
        ConfigError: It cannot be used.
    """
    try:
        return ssl.create_default_context(cafile=ca_certs)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"--backend-ssl-ca-certs {ca_certs} cannot be used: {reason(error)}.", param="backend_ssl_ca_certs"
        ) from error


class ConnectionPool:
    """Of one server.

    Args:
        address: Where it listens.
        tls: For https.
    """

    def __init__(self, address: BackendAddress, tls: ssl.SSLContext) -> None:
        self._address = address
        self._tls = tls if address.tls else None
        self._idle: list[BackendConnection] = []
        self._open: set[BackendConnection] = set()

    @property
    def num_open(self) -> int:
        """Connections, idle ones too."""
        return len(self._open)

    def idle(self) -> BackendConnection | None:
        """A connection that is open already."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and now - connection.idle_since < IDLE_S:
                return connection
            connection.abort()
        return None

    async def connect(self) -> BackendConnection:
        """A new one.

        Raises:
            BackendError: The server cannot be reached.
        """
        loop, address = asyncio.get_running_loop(), self._address
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: BackendConnection(loop, self._forget), address.host, address.port, ssl=self._tls
                )
        except TimeoutError:
            raise BackendError(f"It took no connection within {CONNECT_S:g} s.") from None
        except OSError as error:  # ssl.SSLError is one
            raise BackendError(f"It cannot be reached: {reason(error)}.") from error
        self._open.add(connection)
        return connection

    def put_back(self, connection: BackendConnection) -> None:
        """Its answer was read, or nobody wants the rest of it."""
        if connection.reusable and len(self._idle) < MAX_IDLE:
            connection.finish()
            self._idle.append(connection)
        else:
            connection.abort()

    def close_old(self) -> None:
        """Close what has been idle for long; to be called now and then."""
        now = asyncio.get_running_loop().time()
        while self._idle and now - self._idle[0].idle_since >= IDLE_S:
            self._idle.pop(0).abort()

    def fail_waiting(self, message: str) -> None:
        """Give up the requests whose answers have not begun: the server does not work."""
        for connection in list(self._open):
            if connection.waiting:
                connection.fail(BackendError(message))

    def close(self) -> None:
        """Close all, whatever is on its way."""
        for connection in list(self._open):
            connection.abort()

    def _forget(self, connection: BackendConnection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
