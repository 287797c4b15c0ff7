"""Who gets through a node's port, and that nobody else keeps those waiting who may."""

from __future__ import annotations

import logging
import queue
import socket
import time

import msgspec
import pytest

from quire.errors import ConfigError
from quire.runtime.executor.nodes import gate as gate_module
from quire.runtime.executor.nodes.connection import send_message
from quire.runtime.executor.nodes.gate import PATIENCE_S, Gate, WrongKeyError
from quire.runtime.executor.nodes.link_setup import connect
from quire.runtime.executor.nodes.node_messages import LinkJoin

KEY = b"0123456789abcdef"
LINK = LinkJoin("session", "stream", 0, 1)


def until(condition: object, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.01)


def test_who_has_the_key_arrives_with_what_it_is_for() -> None:
    with Gate("127.0.0.1", 0, KEY) as gate, connect(("127.0.0.1", gate.port), KEY) as end:
        send_message(end, msgspec.msgpack.encode(LINK))
        arrival = gate.arrivals.get(timeout=30)
        assert (arrival.host, arrival.message) == ("127.0.0.1", LINK)
        arrival.connection.close()


def test_strangers_do_not_arrive_and_keep_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with Gate("127.0.0.1", 0, KEY) as gate:
        address = ("127.0.0.1", gate.port)
        silent = [socket.create_connection(address) for _ in range(20)]
        with pytest.raises(WrongKeyError):
            connect(address, b"another key, as long")
        until(lambda: gate.last_refusal)
        assert "from 127.0.0.1 was refused: it has another key" in gate.last_refusal
        with connect(address, KEY) as no_message:
            send_message(no_message, b"\xc1 is no msgpack")
            until(lambda: "another key" not in gate.last_refusal)
        with connect(address, KEY) as end:
            send_message(end, msgspec.msgpack.encode(LINK))
            gate.arrivals.get(timeout=PATIENCE_S / 2).connection.close()
        with pytest.raises(queue.Empty):
            gate.arrivals.get(timeout=0.1)
        for each in silent:
            each.close()
    assert any("it has another key" in record.getMessage() for record in caplog.records)


def test_more_strangers_than_are_heard_are_turned_away_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "MAX_STRANGERS", 2)
    with Gate("127.0.0.1", 0, KEY) as gate:
        silent = [socket.create_connection(("127.0.0.1", gate.port)) for _ in range(2)]
        greeted = [end.recv(100) for end in silent]
        assert all(greeted)
        with socket.create_connection(("127.0.0.1", gate.port)) as third:
            third.settimeout(PATIENCE_S / 2)
            assert third.recv(100) == b""
        for each in silent:
            each.close()


def test_a_closed_gate_is_no_port() -> None:
    with Gate("127.0.0.1", 0, KEY) as gate:
        port = gate.port
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))


def test_an_address_of_another_machine_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"--master-addr 192\.0\.2\.1 --master-port 29501: this machine cannot listen"
    ):
        Gate("192.0.2.1", 29501, KEY)
