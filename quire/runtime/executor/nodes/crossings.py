"""Which links between ranks cross from one node to another, and the connections that carry them on this one.

Ranks that divide the same layers are on one node; nodes have the same number of stages. So streams cross where a stage
is a node's last one, and sampled tokens go from the last node to the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quire.compute.mesh import Mesh
from quire.foundation.processes.launch import SocketEnd


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
    """A node's ranks, and the connected sockets of their links to others.

    Attributes:
        ranks: The ranks that run on the node.
        nodes: How many nodes there are.
        sockets: Descriptors by link.
        stream_bytes, token_bytes: Of the largest message of each kind.
    """

    ranks: range
    nodes: int = 1
    sockets: Mapping[Link, int] = field(default_factory=dict)
    stream_bytes: int = 0
    token_bytes: int = 0

    def before(self, at: Mesh) -> SocketEnd | None:
        """What brings a rank the streams of a stage on another node."""
        return self._end(self.stream_bytes, Link("stream", at.rank - at.tp, at.rank))

    def after(self, at: Mesh) -> SocketEnd | None:
        """What takes its streams to a stage on another node."""
        return self._end(self.stream_bytes, Link("stream", at.rank, at.rank + at.tp))

    def tokens_in(self, at: Mesh) -> SocketEnd | None:
        """What brings a rank of the first stage the sampled tokens of a last one on another node."""
        return self._end(self.token_bytes, Link("tokens", at.size - at.tp, at.rank))

    def tokens_out(self, at: Mesh) -> SocketEnd | None:
        """What takes sampled tokens from a rank to the first stage on another node."""
        return self._end(self.token_bytes, *(Link("tokens", at.rank, rank) for rank in range(at.tp)))

    def _end(self, max_bytes: int, *links: Link) -> SocketEnd | None:
        found = [self.sockets[link] for link in links if link in self.sockets]
        return SocketEnd(found, max_bytes) if found else None
