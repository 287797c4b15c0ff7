"""The links between pipeline stages: streams from each rank to its neighbour in the next stage, and sampled tokens from
the last stage to all ranks of the first. Within a machine they are rings of messages.

Imports no torch: the engine makes the rings, and ranks use their ends.
"""

from __future__ import annotations

import os
import socket
import time
from itertools import chain

from quire.compute.mesh import Mesh
from quire.foundation.processes.launch import LinkEnd, RingEnd, StageEnds
from quire.foundation.processes.shared_memory import SharedMemory
from quire.runtime.executor.message_ring import MessageReader, MessageWriter, RingReader, RingWriter, ring_bytes
from quire.runtime.executor.nodes.crossings import Crossings
from quire.runtime.executor.nodes.socket_link import SocketReader, SocketWriter

MAX_STREAM_BYTES = 1 << 26
_FULL_NAP_S = 1e-3


class StageRings:
    """All rings of a machine's ranks; they are kept open until `close`.

    Args:
        mesh: Its sizes count.
        stream_bytes: Of the largest stream.
        rows: Most rows of a step.
        crossings: Of the machine, and its links to others; None: all ranks are here.
    """

    def __init__(self, mesh: Mesh, stream_bytes: int, rows: int, crossings: Crossings | None = None) -> None:
        self._mesh = mesh
        self._memories: list[SharedMemory] = []
        self._bells: list[int] = []
        size = min(MAX_STREAM_BYTES, 2 * stream_bytes)
        self._crossings = crossings = crossings or Crossings(range(mesh.size))
        here = [rank for rank in crossings.ranks if rank + mesh.tp in crossings.ranks]
        self._streams = {rank: self._ring(size, 1) for rank in here}  # by the rank that sends
        is_one = mesh.pp > 1 and crossings.nodes == 1
        self._tokens = self._ring(token_ring_bytes(mesh.pp, rows), mesh.tp) if is_one else None

    def ends_of(self, rank: int) -> StageEnds:
        """The ends of links that a rank uses."""
        at, tp = Mesh(rank, self._mesh.tp, self._mesh.pp), self._mesh.tp
        tokens_in: LinkEnd | None = self._crossings.tokens_in(at)
        tokens_out: LinkEnd | None = self._crossings.tokens_out(at)
        if self._tokens is not None:
            tokens_in = _reader(self._tokens, at.tp_rank) if at.is_first else None
            tokens_out = self._tokens if at.is_last and at.tp_rank == 0 else None
        return StageEnds(
            before=self._streams.get(rank - tp) or self._crossings.before(at),
            after=self._streams.get(rank) or self._crossings.after(at),
            tokens_in=tokens_in,
            tokens_out=tokens_out,
        )

    def close(self) -> None:
        """Close the rings here, once the ranks have them."""
        for fd in chain((memory.descriptor for memory in self._memories), self._bells):
            os.close(fd)

    def _ring(self, size: int, readers: int) -> RingEnd:
        memory, bells = SharedMemory(ring_bytes(readers, size)), [os.eventfd(0) for _ in range(readers)]
        self._memories.append(memory)
        self._bells += bells
        return RingEnd(memory.descriptor, size, bells, readers)


def max_unread(stages: int) -> int:
    """Steps whose tokens the first stage may leave unread, because no plan has read them so far."""
    return 2 * stages + 2


def token_ring_bytes(stages: int, rows: int) -> int:
    """Bytes of the ring of sampled tokens: so many that the last stage never waits for the first one to read."""
    return (max_unread(stages) + 1) * token_bytes(rows)


def token_bytes(rows: int) -> int:
    """Bytes of the sampled tokens of a step, at most."""
    return 64 + 16 * rows


def _reader(end: RingEnd, number: int) -> RingEnd:
    return RingEnd(end.memory_fd, end.size, [end.bells[number]], end.readers, number)


def open_writer(end: LinkEnd) -> MessageWriter:
    """Open a link's end for the rank that writes."""
    if not isinstance(end, RingEnd):
        return SocketWriter([socket.socket(fileno=fd) for fd in end.socket_fds])

    def ring_bells() -> None:
        for bell in end.bells:
            os.eventfd_write(bell, 1)

    return RingWriter(_memory(end), end.readers, ring_bells, lambda: time.sleep(_FULL_NAP_S))


def open_reader(end: LinkEnd) -> MessageReader:
    """Open a link's end for a rank that reads."""
    if not isinstance(end, RingEnd):
        (fd,) = end.socket_fds
        return SocketReader(socket.socket(fileno=fd), end.max_bytes)
    (bell,) = end.bells

    def wait() -> None:
        os.eventfd_read(bell)

    return RingReader(_memory(end), end.readers, end.reader, wait)


def _memory(end: RingEnd) -> SharedMemory:
    return SharedMemory(ring_bytes(end.readers, end.size), end.memory_fd)
