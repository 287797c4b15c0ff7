"""Where a node listens while an engine starts: lets in connections of those that have the key.

Each connection is heard in a thread of its own, so one that says nothing keeps nobody waiting. Decides nothing: what a
connection is for is read, and handed on.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from contextlib import suppress
from typing import NamedTuple

import msgspec

from quire.errors import ConfigError
from quire.runtime.executor.nodes.connection import ConnectionLostError, receive_message, set_up
from quire.runtime.executor.nodes.handshake import PATIENCE_S, WrongKeyError, greet
from quire.runtime.executor.nodes.node_messages import FromStranger

MAX_STRANGERS = 64
"""Connections that are heard at the same time; more are closed at once."""
_MAX_BYTES = 1 << 16
_BACKLOG = 128
_log = logging.getLogger(__name__)


class Arrival(NamedTuple):
    """A connection of a node that has the key.

    Attributes:
        connection: Blocks.
        host: Address from which it comes.
        message: What it is for.
    """

    connection: socket.socket
    host: str
    message: FromStranger


class Gate:
    """A context in which connections are let in.

    Args:
        host, port: Where to listen; port 0 for any free one.
        key: That both sides must have.

    Attributes:
        arrivals: Those that were let in, in order.
        port: Where it listens.
        last_refusal: About the last one that was not; empty: none.

    Raises:
        ConfigError: Nobody can listen there.
    """

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._key = key
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"--master-addr {host} --master-port {port}: this machine cannot listen there ({error}). Give an "
                "address of the machine with --node-rank 0, and a free port.",
                param="master_addr",
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.last_refusal = ""
        self._places = threading.BoundedSemaphore(MAX_STRANGERS)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nobody is let in any more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listener.close()
        self._thread.join(PATIENCE_S)
        while not self.arrivals.empty():
            self.arrivals.get().connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return  # closed
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._hear, args=(connection, str(address[0])), daemon=True).start()

    def _hear(self, connection: socket.socket, host: str) -> None:
        try:
            set_up(connection)
            greet(connection, self._key)
            message = receive_message(connection, _MAX_BYTES, time.monotonic() + PATIENCE_S)
            connection.settimeout(None)
            self.arrivals.put(Arrival(connection, host, msgspec.msgpack.decode(message, type=FromStranger)))
        except (WrongKeyError, ConnectionLostError, OSError, msgspec.MsgspecError) as error:
            connection.close()
            refusal = f"a connection from {host} was refused: {getattr(error, 'message', error)}"
            if refusal != self.last_refusal:  # a flood of one kind is one line
                _log.warning("%s", refusal)
            self.last_refusal = refusal
        finally:
            self._places.release()
