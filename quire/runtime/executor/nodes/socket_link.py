"""The ends of a link between ranks on two machines, as the ranks use them: connections that their nodes have made."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from quire.errors import EngineDeadError
from quire.runtime.executor.nodes.connection import ConnectionLostError, receive_message, send_message

GRACE_S = 10.0
"""How long a rank waits before it reports a lost link. If a rank or node is gone, that is known elsewhere, and this
rank is ended meanwhile; if none is, the link itself is to blame."""


class SocketWriter:
    """Sends each message to all readers.

    Args:
        connections: One for each reader.
        sleep: For the time that a node gets to end its rank.
    """

    def __init__(self, connections: Sequence[socket.socket], sleep: Callable[[float], None] = time.sleep) -> None:
        self._connections = connections
        self._sleep = sleep

    def write(self, message: bytes) -> None:
        """Send a message to all readers; may wait until they have read earlier ones.

        Raises:
            EngineDeadError: The link is lost.
        """
        try:
            for connection in self._connections:
                send_message(connection, message)
        except ConnectionLostError as error:
            self._sleep(GRACE_S)
            raise EngineDeadError(f"A link to a rank on another node was lost: {error.message}.") from error


class SocketReader:
    """Receives what a SocketWriter sends.

    Args:
        connection: To the writer.
        max_bytes: Of a message.
        sleep: As for SocketWriter.
    """

    def __init__(self, connection: socket.socket, max_bytes: int, sleep: Callable[[float], None] = time.sleep) -> None:
        self._connection = connection
        self._max_bytes = max_bytes
        self._sleep = sleep

    def read(self) -> bytes:
        """Wait for the next message and return it.

        Raises:
            EngineDeadError: The link is lost, or brings what is no message.
        """
        try:
            return receive_message(self._connection, self._max_bytes)
        except ConnectionLostError as error:
            self._sleep(GRACE_S)
            raise EngineDeadError(f"A link from a rank on another node was lost: {error.message}.") from error
