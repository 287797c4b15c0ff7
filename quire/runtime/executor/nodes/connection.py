"""Messages over a TCP connection between machines, each with its length before it.

A message that says it is longer than agreed is the end of the connection, before memory is taken for it. Knows nothing
about what messages mean.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress

from quire.errors import QuireError

MAX_BYTES = 1 << 28
"""Bytes of a message between nodes, at most: a plan, a result, settings."""
LOST_AFTER_MS = 15_000
"""How long a machine may be silent, and acknowledge nothing, before it is taken for gone."""
FRAME = struct.Struct("<Q")
"""The length that stands before each message."""
_CHUNK = 1 << 16
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", LOST_AFTER_MS))


class ConnectionLostError(QuireError):
    """The other side is gone, or sent something that is not a message."""


def set_up(connection: socket.socket) -> None:
    """Let small messages be sent at once, and the kernel notice when the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if (option := getattr(socket, name, None)) is not None:  # they are Linux's
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def send_message(connection: socket.socket, message: bytes) -> None:
    """Send a message, on a socket that blocks.

    Raises:
        ConnectionLostError: The other side is gone, or did not take it within the socket's timeout.
    """
    try:
        if len(message) <= _CHUNK:  # in one packet, if it fits
            connection.sendall(FRAME.pack(len(message)) + message)
        else:
            connection.sendall(FRAME.pack(len(message)))
            connection.sendall(message)
    except OSError as error:
        raise ConnectionLostError(f"nothing can be sent: {error}") from error


def receive_message(connection: socket.socket, max_bytes: int, deadline: float | None = None) -> bytes:
    """Receive a message of at most `max_bytes`, on a socket that blocks.

    Args:
        deadline: When all of it has to be there, as time.monotonic() counts; None: it may take any time.

    Raises:
        ConnectionLostError: It did not come, or is too long.
    """
    (length,) = FRAME.unpack(receive_exactly(connection, FRAME.size, deadline))
    _check(length, max_bytes)
    return receive_exactly(connection, length, deadline)


def receive_exactly(connection: socket.socket, length: int, deadline: float | None = None) -> bytes:
    """Receive this many bytes; `deadline` and errors as in `receive_message`."""
    received = bytearray(length)
    view = memoryview(received)
    try:
        while view:
            if deadline is not None:
                connection.settimeout(max(1e-3, deadline - time.monotonic()))
            count = connection.recv_into(view)
            if not count:
                raise ConnectionLostError("the other side has closed the connection")
            view = view[count:]
    except OSError as error:
        raise ConnectionLostError(f"nothing came: {error}") from error
    return bytes(received)


class Connection:
    """Sends and receives messages over a connected socket, which it owns, without waiting."""

    def __init__(self, connected: socket.socket, max_bytes: int = MAX_BYTES) -> None:
        self._socket = connected
        self._socket.setblocking(False)
        self._max_bytes = max_bytes
        self._unread = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do, once the socket is writable."""
        return bool(self._unsent)

    def post(self, message: bytes) -> None:
        """Send what the network takes of a message at once; `flush` sends the rest.

        Raises:
            ConnectionLostError: The other side is gone.
        """
        self._unsent += FRAME.pack(len(message))
        self._unsent += message
        self.flush()

    def flush(self) -> None:
        """Send what the network takes of the unsent bytes; raises as `post` does."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ConnectionLostError(f"nothing can be sent: {error}") from error

    def take(self) -> list[bytes]:
        """The messages that have come completely; called when the socket is readable.

        Raises:
            ConnectionLostError: The other side is gone, or a message is too long.
        """
        try:
            chunk = self._socket.recv(_CHUNK)
            if not chunk:
                raise ConnectionLostError("the other side has closed the connection")
            self._unread += chunk
        except BlockingIOError:
            return []
        except OSError as error:
            raise ConnectionLostError(f"nothing came: {error}") from error
        return list(whole_messages(self._unread, self._max_bytes))

    def close(self, patience_s: float = 0.0) -> None:
        """End the connection, after the other side had some time to take what is unsent and to close its end: closing
        with something unread here would discard what the other side has not read yet."""
        deadline = time.monotonic() + patience_s
        with suppress(OSError):
            if patience_s:
                self._socket.settimeout(patience_s)
                self._socket.sendall(self._unsent)
                self._socket.shutdown(socket.SHUT_WR)
                while self._socket.recv(_CHUNK) and time.monotonic() < deadline:
                    pass
        self._unsent.clear()
        self._socket.close()


def whole_messages(unread: bytearray, max_bytes: int = MAX_BYTES) -> list[bytes]:
    """Take the messages out of `unread` that have come completely.

    Raises:
        ConnectionLostError: A message is too long.
    """
    found, begin = [], 0
    while len(unread) - begin >= FRAME.size:
        (length,) = FRAME.unpack_from(unread, begin)
        _check(length, max_bytes)
        end = begin + FRAME.size + length
        if len(unread) < end:
            break
        found.append(bytes(unread[begin + FRAME.size : end]))
        begin = end
    del unread[:begin]
    return found


def _check(length: int, max_bytes: int) -> None:
    if length > max_bytes:
        raise ConnectionLostError(f"a message of {length:,} bytes was announced, and {max_bytes:,} are allowed")
