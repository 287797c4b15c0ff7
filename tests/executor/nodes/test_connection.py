"""Messages between machines: whole and in order, bounded, and an end that is noticed."""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
import time

import pytest

from quire.runtime.executor.nodes.connection import (
    LOST_AFTER_MS,
    Connection,
    ConnectionLostError,
    receive_message,
    send_message,
    set_up,
)
from tests.executor.nodes.sockets import connected

ANNOUNCED = struct.Struct("<Q").pack(1 << 40)


def taken(connection: Connection, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        assert select.select([connection], [], [], 60)[0]
        found += connection.take()
    return found


def test_messages_come_whole_and_in_order_however_they_are_cut() -> None:
    rng = random.Random(0)
    messages = [rng.randbytes(rng.choice((0, 1, 8, 500, 70_000))) for _ in range(200)]
    with connected() as (client, server):
        reader = Connection(server)

        def send_in_pieces() -> None:
            stream = b"".join(struct.pack("<Q", len(each)) + each for each in messages)
            while stream:
                count = rng.choice((1, 7, 9, 4_000, 100_000))
                client.sendall(stream[:count])
                stream = stream[count:]

        sender = threading.Thread(target=send_in_pieces)
        sender.start()
        assert taken(reader, len(messages)) == messages
        sender.join()
        reader.close()


def test_posting_never_waits_for_a_reader_and_loses_nothing() -> None:
    messages = [bytes([number]) * 1_000_000 for number in range(20)]
    with connected() as (client, server):
        writer, reader = Connection(client), Connection(server)
        for message in messages:
            writer.post(message)  # 20 MB that nobody reads: more than sockets hold
        assert writer.has_unsent
        found: list[bytes] = []
        while len(found) < len(messages):
            writer.flush()
            found += reader.take()
        assert found == messages
        assert not writer.has_unsent


def test_a_message_that_is_too_long_is_refused_before_memory_is_taken_for_it() -> None:
    with connected() as (client, server):
        client.sendall(ANNOUNCED)
        with pytest.raises(ConnectionLostError, match="1,099,511,627,776 bytes was announced"):
            receive_message(server, 1000)
    with connected() as (client, server):
        client.sendall(ANNOUNCED)
        with pytest.raises(ConnectionLostError, match="was announced, and 268,435,456 are allowed"):
            taken(Connection(server), 1)


def test_the_end_of_the_other_side_is_an_error_also_within_a_message() -> None:
    for begun in (b"", struct.pack("<Q", 10), struct.pack("<Q", 10) + b"half"):
        with connected() as (client, server):
            client.sendall(begun)
            client.close()
            with pytest.raises(ConnectionLostError, match="has closed"):
                receive_message(server, 1000)
        with connected() as (client, server):
            client.sendall(begun)
            client.close()
            with pytest.raises(ConnectionLostError, match="has closed"):
                taken(Connection(server), 1)


def test_a_half_open_connection_ends_by_its_deadline() -> None:
    """The other side is there and says nothing, or goes on for ever, byte by byte."""
    with connected() as (_, server), pytest.raises(ConnectionLostError, match="nothing came"):
        receive_message(server, 1000, time.monotonic() + 0.2)
    with connected() as (client, server):
        ended = threading.Event()

        def dribble() -> None:
            client.sendall(struct.pack("<Q", 1000))
            while not ended.wait(0.02):
                client.sendall(b"x")

        sender = threading.Thread(target=dribble)
        sender.start()
        with pytest.raises(ConnectionLostError, match="nothing came"):
            receive_message(server, 1000, time.monotonic() + 0.5)
        ended.set()
        sender.join()


def test_what_was_posted_arrives_also_if_both_sides_close() -> None:
    """Closing a socket that has something unread would take from the other side what it has not read."""
    with connected() as (client, server):
        head, node = Connection(client), Connection(server)
        node.post(b"unread by the head")
        head.post(b"end")
        closing = threading.Thread(target=head.close, args=(30.0,))
        closing.start()
        assert taken(node, 1) == [b"end"]
        node.close()
        closing.join(60)
        assert not closing.is_alive()


def test_the_kernel_looks_whether_the_other_machine_is_there() -> None:
    with connected() as (client, _):
        set_up(client)
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == LOST_AFTER_MS
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5


def test_a_message_to_who_is_gone_is_an_error() -> None:
    with connected() as (client, server):
        server.close()

        def send_until_it_fails() -> None:
            for _ in range(100):
                send_message(client, b"x" * 100_000)

        with pytest.raises(ConnectionLostError, match="nothing can be sent"):
            send_until_it_fails()
