"""Both sides of a new connection show that they have the same key, without sending it.

Each proves it by an HMAC-SHA256 over both sides' random numbers, so nothing that was heard earlier helps, and neither
side's proof can be sent back as its own. Proofs are compared in constant time, and what is read before them is bounded
in size and time. What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

from quire.errors import QuireError
from quire.runtime.executor.nodes.connection import ConnectionLostError, receive_exactly

PATIENCE_S = 10.0
"""What the whole handshake may take."""
_MAGIC = b"quire nodes 1\n"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_REFUSED = bytes(_PROOF_BYTES)
"""What the server sends in place of its proof to refuse a client."""


class WrongKeyError(QuireError):
    """The other side has another key, or is no node of Quire's."""


def greet(connection: socket.socket, key: bytes) -> None:
    """The side that has accepted the connection.

    Raises:
        WrongKeyError: It is not from a node with the same key.
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
    """The side that has connected; raises as `greet` does."""
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
