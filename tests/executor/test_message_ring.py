"""The ring of messages: every reader gets every message, whole and in order, however long it is."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from quire.foundation.processes.shared_memory import SharedMemory
from quire.runtime.executor.message_ring import RingReader, RingWriter, ring_bytes

SIZE = 64


def test_every_reader_gets_every_message() -> None:
    """Also those that are longer than the ring, while readers are slow."""
    readers, rng = 3, random.Random(0)
    messages = [rng.randbytes(rng.choice((0, 1, 7, 8, 55, 56, 64, 65, 300))) for _ in range(400)]
    memory, published = SharedMemory(ring_bytes(readers, SIZE)), threading.Event()
    writer = RingWriter(memory, readers, published.set, lambda: time.sleep(1e-4))

    def read(number: int) -> list[bytes]:
        slow = random.Random(number)

        def wait() -> None:
            time.sleep(slow.choice((0, 1e-4)))

        reader = RingReader(memory, readers, number, wait)
        return [reader.read() for _ in messages]

    with ThreadPoolExecutor(readers) as pool:
        found = [pool.submit(read, number) for number in range(readers)]
        for message in messages:
            writer.write(message)
        assert all(future.result(60) == messages for future in found)


def test_readers_are_told_of_what_they_must_read_before_there_is_room() -> None:
    """A reader that sleeps until it is told must not be waited for without being told."""
    memory, bell = SharedMemory(ring_bytes(1, SIZE)), threading.Semaphore(0)
    writer = RingWriter(memory, 1, bell.release, lambda: time.sleep(1e-4))
    reader = RingReader(memory, 1, 0, lambda: bell.acquire(timeout=30) and None)
    message = bytes(range(256)) * 3
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(lambda: [reader.read() for _ in range(3)])
        for _ in range(3):
            writer.write(message)
        assert read.result(60) == [message] * 3


def test_a_full_ring_waits_for_the_slowest_reader() -> None:
    memory, waits = SharedMemory(ring_bytes(2, SIZE)), 0
    readers = [RingReader(memory, 2, number, lambda: None) for number in range(2)]

    def wait() -> None:
        nonlocal waits
        waits += 1
        if waits == 3:
            assert readers[1].read() == b"a" * 40

    writer = RingWriter(memory, 2, lambda: None, wait)
    writer.write(b"a" * 40)
    assert readers[0].read() == b"a" * 40
    writer.write(b"b" * 40)
    assert waits == 3
    assert [reader.read() for reader in readers] == [b"b" * 40] * 2
