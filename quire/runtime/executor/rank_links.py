"""The links between pipeline stages: streams from each rank to its neighbour in the next stage, and sampled tokens from
the last stage to all ranks of the first.

Within a machine they are rings of messages, between machines connections. Ranks that divide the same layers are on one
node; nodes have the same number of stages. So streams cross where a stage is a node's last one, and sampled tokens go
from the last node to the first. Imports no torch: the engine makes the links, and ranks use their ends.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quire.compute.mesh import Mesh
from quire.errors import EngineDeadError
from quire.foundation.processes.launch import LinkEnd, RingEnd, SocketEnd, StageEnds
from quire.foundation.processes.shared_memory import SharedMemory
from quire.runtime.executor.message_ring import MessageReader, MessageWriter, RingReader, RingWriter, ring_bytes
from quire.runtime.executor.nodes.connection import ConnectionLostError, receive_message, send_message

GRACE_S = 10.0
"""How long a rank waits before it reports a lost link. If a rank or node is gone, the engine sees that itself and ends
this rank meanwhile; otherwise the link itself is to blame."""
MAX_STREAM_BYTES = 1 << 26
_FULL_NAP_S = 1e-3


class Link(NamedTuple):
    """A way for messages from one rank to another: streams between stages, or sampled tokens."""

    kind: Literal["stream", "tokens"]
    sender: int
    receiver: int


def crossing_links(mesh: Mesh, nodes: int) -> list[Link]:
    """The links between ranks on different nodes."""
    if nodes == 1:
        return []
    streams = [Link("stream", rank, rank + mesh.tp) for rank in range(mesh.size - mesh.tp)]
    tokens = [Link("tokens", mesh.size - mesh.tp, rank) for rank in range(mesh.tp)]
    return [
        link for link in streams + tokens if node_of(link.sender, mesh, nodes) != node_of(link.receiver, mesh, nodes)
    ]


def node_of(rank: int, mesh: Mesh, nodes: int) -> int:
    """The number of the node that a rank is on."""
    return rank * nodes // mesh.size


def ranks_of(node: int, mesh: Mesh, nodes: int) -> range:
    """The ranks on a node."""
    each = mesh.size // nodes
    return range(node * each, (node + 1) * each)


@dataclass(frozen=True)
class Crossings:
    """A node's ranks, and the connected sockets of their links to other nodes.

    Attributes:
        ranks: The ranks that run on the node.
        nodes: How many nodes there are.
        sockets: The descriptors by link.
        stream_bytes, token_bytes: The size of the largest message of each kind.
    """

    ranks: range
    nodes: int = 1
    sockets: Mapping[Link, int] = field(default_factory=dict)
    stream_bytes: int = 0
    token_bytes: int = 0

    def before(self, at: Mesh) -> SocketEnd | None:
        """The end that receives streams from a stage on another node."""
        return self._end(self.stream_bytes, Link("stream", at.rank - at.tp, at.rank))

    def after(self, at: Mesh) -> SocketEnd | None:
        """The end that sends streams to a stage on another node."""
        return self._end(self.stream_bytes, Link("stream", at.rank, at.rank + at.tp))

    def tokens_in(self, at: Mesh) -> SocketEnd | None:
        """The end where a rank of the first stage receives sampled tokens from another node."""
        return self._end(self.token_bytes, Link("tokens", at.size - at.tp, at.rank))

    def tokens_out(self, at: Mesh) -> SocketEnd | None:
        """The end that sends sampled tokens to the first stage on another node."""
        return self._end(self.token_bytes, *(Link("tokens", at.rank, rank) for rank in range(at.tp)))

    def _end(self, max_bytes: int, *links: Link) -> SocketEnd | None:
        found = [self.sockets[link] for link in links if link in self.sockets]
        return SocketEnd(found, max_bytes) if found else None


class SocketWriter:
    """Sends each message over all connections, one for each reader."""

    def __init__(self, connections: Sequence[socket.socket], sleep: Callable[[float], None] = time.sleep) -> None:
        self._connections = connections
        self._sleep = sleep

    def write(self, message: bytes) -> None:
        """
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
    """Receives what a SocketWriter sends, in messages of at most `max_bytes`."""

    def __init__(self, connection: socket.socket, max_bytes: int, sleep: Callable[[float], None] = time.sleep) -> None:
        self._connection = connection
        self._max_bytes = max_bytes
        self._sleep = sleep

    def read(self) -> bytes:
        """
        Raises:
            EngineDeadError: The link is lost, or brings something that is not a message.
        """
        try:
            return receive_message(self._connection, self._max_bytes)
        except ConnectionLostError as error:
            self._sleep(GRACE_S)
            raise EngineDeadError(f"A link from a rank on another node was lost: {error.message}.") from error


class StageRings:
    """All rings of a machine's ranks, which are kept open until `close`.

    Args:
        mesh: Any rank's.
        stream_bytes: The size of the largest stream.
        rows: The maximum number of rows of a step.
        crossings: The machine's links to others; None: all ranks are here.
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
        for memory in self._memories:
            memory.close_descriptor()
        for bell in self._bells:
            os.close(bell)

    def _ring(self, size: int, readers: int) -> RingEnd:
        memory, bells = SharedMemory(ring_bytes(readers, size)), [os.eventfd(0) for _ in range(readers)]
        self._memories.append(memory)
        self._bells += bells
        return RingEnd(memory.descriptor, size, bells, readers)


def max_unread(stages: int) -> int:
    """The number of steps whose tokens the first stage may leave unread, because no plan has read them so far."""
    return 2 * stages + 2


def token_ring_bytes(stages: int, rows: int) -> int:
    """The size of the ring of sampled tokens: the last stage never waits for the first one to read."""
    return (max_unread(stages) + 1) * token_bytes(rows)


def token_bytes(rows: int) -> int:
    """The maximum number of bytes of a step's sampled tokens."""
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
