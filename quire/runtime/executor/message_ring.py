"""Messages from one process to several through memory that they share: written once, read by each.

A ring of bytes. The writer counts what it has written, each reader what it has read, and a message longer than the ring
goes through it piece by piece. Who waits for whom is not decided here: `wait` is called as long as there is nothing to
do. Counters are aligned words of 8 bytes; the processors that Quire's kernels are for (x86) show stores in order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

from quire.foundation.processes.shared_memory import SharedMemory

RING_BYTES = 1 << 22
_LINE = 64
_LENGTH = struct.Struct("<Q")


def ring_bytes(readers: int, size: int = RING_BYTES) -> int:
    """Bytes of shared memory that a ring of `size` bytes takes."""
    return _LINE * (1 + readers) + size


class MessageWriter(Protocol):
    """Sends messages to other ranks, through a ring or through connections between machines."""

    def write(self, message: bytes) -> None:
        """Send a message to all readers; may wait until they have read earlier ones."""


class MessageReader(Protocol):
    """Receives messages in the order in which they were written."""

    def read(self) -> bytes:
        """Wait for the next message and return it."""


class _Ring:
    """The memory: a line with the writer's counter, one for each reader's, then the bytes."""

    def __init__(self, memory: SharedMemory, readers: int) -> None:
        counters = memoryview(memory.view)[: _LINE * (1 + readers)].cast("Q")[:: _LINE // 8]
        self.written = counters[:1]
        self.read = counters[1:]  # by reader
        self.bytes = memoryview(memory.view)[_LINE * (1 + readers) :]


class RingWriter:
    """Writes messages to a ring in memory of `ring_bytes`.

    Calls `published` when there is more to read, and `wait` while there is no room.
    """

    def __init__(
        self, memory: SharedMemory, readers: int, published: Callable[[], None], wait: Callable[[], None]
    ) -> None:
        self._ring = _Ring(memory, readers)
        self._published = published
        self._wait = wait

    def write(self, message: bytes) -> None:
        ring, left = self._ring, memoryview(_LENGTH.pack(len(message)) + message)
        size = len(ring.bytes)
        while left:
            slowest, written = min(ring.read), ring.written[0]
            at = written % size
            count = min(len(left), size - (written - slowest), size - at)
            if not count:
                self._wait()
                continue
            ring.bytes[at : at + count] = left[:count]
            ring.written[0] = written + count
            left = left[count:]
            if not left or written + count - slowest == size:
                self._published()


class RingReader:
    """Reader number `reader` of a ring. Calls `wait` while there is nothing to read."""

    def __init__(self, memory: SharedMemory, readers: int, reader: int, wait: Callable[[], None]) -> None:
        self._ring = _Ring(memory, readers)
        self._reader = reader
        self._wait = wait

    def read(self) -> bytes:
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        return self._take(length)

    @property
    def has_more(self) -> bool:
        """Whether there is a message, or the beginning of one."""
        return self._ring.written[0] > self._ring.read[self._reader]

    def _take(self, length: int) -> bytes:
        ring, taken = self._ring, bytearray()
        size = len(ring.bytes)
        while len(taken) < length:
            begin = ring.read[self._reader]
            at = begin % size
            count = min(length - len(taken), ring.written[0] - begin, size - at)
            if not count:
                self._wait()
                continue
            taken += ring.bytes[at : at + count]
            ring.read[self._reader] = begin + count
        return bytes(taken)
