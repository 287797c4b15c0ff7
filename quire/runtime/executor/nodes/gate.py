"""Where a node listens while an engine starts: lets in connections of nodes that have the same key.

Each connection is heard in a thread of its own, so one that says nothing keeps nobody waiting. The gate reads what a
connection is for, and decides nothing.

Both sides show that they have the key without sending it: each proves it by an HMAC-SHA256 over both sides' random
numbers, so nothing that was heard earlier helps, and neither side's proof can be sent back as its own. Proofs are
compared in constant time, and what is read before them is bounded in size and time. What follows is neither encrypted
nor signed.
"""

from __future__ import annotations

import hmac
import logging
import queue
import secrets
import socket
import threading
import time
from contextlib import suppress
from typing import NamedTuple

import msgspec

from quire.errors import ConfigError, QuireError
from quire.runtime.executor.nodes.connection import ConnectionLostError, receive_exactly, receive_message, set_up
from quire.runtime.executor.nodes.node_messages import FromStranger

PATIENCE_S = 10.0
"""What the whole handshake may take."""
_MAGIC = b"quire nodes 1\n"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_REFUSED = bytes(_PROOF_BYTES)
"""What the server sends in place of its proof to refuse a client."""
MAX_STRANGERS = 64
"""Connections that are heard at the same time; more are closed at once."""
_MAX_BYTES = 1 << 16
_BACKLOG = 128
_log = logging.getLogger(__name__)


class WrongKeyError(QuireError):
    """The other side has another key, or is no node of Quire's."""


def greet(connection: socket.socket, key: bytes) -> None:
    """Do the handshake on the side that has accepted the connection.

    Raises:
        WrongKeyError: The connection is not from a node with the same key.
        ConnectionLostError: The other side is gone, or too slow.
    """
    deadline = time.monotonic() + PATIENCE_S
    own = secrets.token_bytes(_NONCE_BYTES)
    _send(connection, _MAGIC + own)
    theirs = receive_exactly(connection, _NONCE_BYTES, deadline)
    proof = receive_exactly(connection, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(key, b"joins", own, theirs)):
        _send(connection, _REFUSED)
        raise WrongKeyError("it has another key, or is no node of Quire's")
    _send(connection, _proof(key, b"accepts", own, theirs))
    connection.settimeout(None)


def introduce(connection: socket.socket, key: bytes) -> None:
    """Do the handshake on the side that has connected; raises as `greet` does."""
    deadline = time.monotonic() + PATIENCE_S
    if receive_exactly(connection, len(_MAGIC), deadline) != _MAGIC:
        raise WrongKeyError("what listens there is no node of Quire's, or of another version")
    theirs = receive_exactly(connection, _NONCE_BYTES, deadline)
    own = secrets.token_bytes(_NONCE_BYTES)
    _send(connection, own + _proof(key, b"joins", theirs, own))
    answer = receive_exactly(connection, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(answer, _proof(key, b"accepts", theirs, own)):
        raise WrongKeyError("it has another key")
    connection.settimeout(None)


def _proof(key: bytes, role: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.digest(key, role + server + client, "sha256")


def _send(connection: socket.socket, data: bytes) -> None:
    try:
        connection.settimeout(PATIENCE_S)
        connection.sendall(data)
    except OSError as error:
        raise ConnectionLostError(f"nothing can be sent: {error}") from error


class Arrival(NamedTuple):
    """A connection of a node that has the key: a blocking socket, the address it comes from, and what it is for."""

    connection: socket.socket
    host: str
    message: FromStranger


class Gate:
    """A context in which connections are let in.

    Args:
        host, port: Where to listen; port 0 for any free one.
        key: The key that both sides must have.

    Attributes:
        arrivals: The connections that were let in, in order.
        port: Where it listens.
        last_refusal: Why the last connection was refused; empty: none was.

    Raises:
        ConfigError: This machine cannot listen there.
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
        """Stop listening, and close connections that nobody took."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
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
