"""Who does not have the key is not let in, and learns nothing that helps."""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from quire.errors import QuireError
from quire.runtime.executor.nodes import gate
from quire.runtime.executor.nodes.connection import ConnectionLostError, receive_exactly
from quire.runtime.executor.nodes.gate import WrongKeyError, greet, introduce
from tests.executor.nodes.sockets import connected

KEY = b"0123456789abcdef"


def both(server_side: Callable[[socket.socket], Any], client_side: Callable[[socket.socket], Any]) -> list[Any]:
    """What each side raised or returned: of the server, and of the client."""
    found: list[Any] = [None, None]

    def run(place: int, side: Callable[[socket.socket], Any], end: socket.socket) -> None:
        try:
            found[place] = side(end)
        except QuireError as error:
            found[place] = error
            end.close()

    with connected() as (client, server):
        thread = threading.Thread(target=run, args=(0, server_side, server))
        thread.start()
        run(1, client_side, client)
        thread.join(60)
    return found


def test_both_sides_have_the_key() -> None:
    assert both(lambda end: greet(end, KEY), lambda end: introduce(end, KEY)) == [None, None]


def test_another_key_is_refused_on_both_sides() -> None:
    server, client = both(lambda end: greet(end, KEY), lambda end: introduce(end, b"another" + KEY))
    assert isinstance(server, WrongKeyError)
    assert isinstance(client, WrongKeyError)


def test_a_server_without_the_key_is_found_out() -> None:
    """It lets everyone in, and sends back what it was sent."""

    def impostor(end: socket.socket) -> None:
        end.sendall(b"quire nodes 1\n" + bytes(32))
        answer = receive_exactly(end, 64)
        end.sendall(answer[32:])

    _, client = both(impostor, lambda end: introduce(end, KEY))
    assert isinstance(client, WrongKeyError)


def test_a_proof_that_was_heard_is_of_no_use() -> None:
    heard: list[bytes] = []

    def listens(end: socket.socket) -> None:
        hello = receive_exactly(end, 46)
        nonce = b"n" * 32
        heard.append(nonce + hmac.digest(KEY, b"joins" + hello[14:] + nonce, "sha256"))
        end.sendall(heard[0])
        receive_exactly(end, 32)

    def replays(end: socket.socket) -> bytes:
        receive_exactly(end, 46)
        end.sendall(heard[0])
        return receive_exactly(end, 32)

    assert both(lambda end: greet(end, KEY), listens)[0] is None
    server, answer = both(lambda end: greet(end, KEY), replays)
    assert isinstance(server, WrongKeyError)
    assert answer == bytes(32)


def test_another_protocol_is_no_node() -> None:
    def http(end: socket.socket) -> None:
        end.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    _, client = both(http, lambda end: introduce(end, KEY))
    assert isinstance(client, WrongKeyError)


def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "PATIENCE_S", 0.2)
    with connected() as (_, server), pytest.raises(ConnectionLostError):
        greet(server, KEY)


def test_proofs_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    constant_time = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        return constant_time(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    both(lambda end: greet(end, KEY), lambda end: introduce(end, KEY))
    assert compared == [32, 32]
