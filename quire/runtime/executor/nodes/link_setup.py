"""Connects the links between ranks of different machines while an engine starts: the writing rank's node connects, and
the reading rank's node lets it in. All nodes do this at the same time.
"""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import msgspec

from quire.compute.mesh import Mesh
from quire.errors import EngineDeadError
from quire.runtime.executor.nodes.connection import ConnectionLostError, send_message, set_up
from quire.runtime.executor.nodes.gate import PATIENCE_S, Gate, WrongKeyError, introduce
from quire.runtime.executor.nodes.node_messages import LinkJoin, Refused
from quire.runtime.executor.rank_links import Link, crossing_links, node_of

LINKS_PATIENCE_S = 60.0
"""How long all links of a node may take, once all nodes are there."""
_LOOK_S = 0.2


def connect(address: tuple[str, int], key: bytes) -> socket.socket:
    """Connect to a node that has the key.

    Raises:
        OSError: Nobody listens there.
        ConnectionLostError: The other side is gone, or too slow.
        WrongKeyError: It has another key, or is no node of Quire's.
    """
    connection = socket.create_connection(address, timeout=PATIENCE_S)
    try:
        set_up(connection)
        introduce(connection, key)
    except BaseException:
        connection.close()
        raise
    return connection


@dataclass(frozen=True)
class LinkSetup:
    """What a node needs to connect its links.

    Attributes:
        mesh: The mesh of any rank.
        node, nodes: The node's number, and how many there are.
        session: The engine's.
        addresses: Where each node listens.
        key: The key that all nodes have.
    """

    mesh: Mesh
    node: int
    nodes: int
    session: str
    addresses: Sequence[tuple[str, int]]
    key: bytes

    def open(self, gate: Gate, check: Callable[[], None]) -> dict[Link, socket.socket]:
        """Connect all links of this node, and return them.

        Args:
            gate: This node's.
            check: Called while nothing comes; raises if there is no use in waiting.

        Raises:
            EngineDeadError: A link could not be made; the message names the node.
        """
        deadline = time.monotonic() + LINKS_PATIENCE_S
        links = crossing_links(self.mesh, self.nodes)
        with ExitStack() as opened:
            found: dict[Link, socket.socket] = {}
            for link in links:
                if self._of(link.sender) == self.node:
                    found[link] = opened.enter_context(self._connected(link))
            missing = {link for link in links if self._of(link.receiver) == self.node}
            while missing:
                check()
                if time.monotonic() > deadline:
                    late = min(missing)
                    raise EngineDeadError(
                        f"Node {self._of(late.sender)} of {self.nodes} did not connect to node {self.node} within "
                        f"{LINKS_PATIENCE_S:g} s: see whether a firewall lets nodes reach one another at any port."
                    )
                if (arrived := self._arrived(gate, missing)) is not None:
                    link, connection = arrived
                    found[link] = opened.enter_context(connection)
                    missing.discard(link)
            opened.pop_all()
            return found

    def _of(self, rank: int) -> int:
        return node_of(rank, self.mesh, self.nodes)

    def _connected(self, link: Link) -> socket.socket:
        receiver = self._of(link.receiver)
        host, port = self.addresses[receiver]
        try:
            connection = connect((host, port), self.key)
            send_message(connection, msgspec.msgpack.encode(LinkJoin(self.session, *link)))
        except (OSError, ConnectionLostError, WrongKeyError) as error:
            cause = getattr(error, "message", error)
            raise EngineDeadError(
                f"Node {self.node} cannot reach node {receiver} at {host}:{port} ({cause}): see whether a firewall "
                "lets nodes reach one another at any port."
            ) from error
        return connection

    def _arrived(self, gate: Gate, missing: set[Link]) -> tuple[Link, socket.socket] | None:
        try:
            arrival = gate.arrivals.get(timeout=_LOOK_S)
        except queue.Empty:
            return None
        message = arrival.message
        if isinstance(message, LinkJoin):
            for link in missing:
                if message == LinkJoin(self.session, *link):
                    return link, arrival.connection
        else:
            refuse(arrival.connection, "an engine has just started; wait for the next one", is_final=False)
        arrival.connection.close()
        return None


def refuse(connection: socket.socket, message: str, *, is_final: bool) -> None:
    """Tell a node why it is not taken, and end the connection."""
    with connection:
        connection.settimeout(PATIENCE_S)
        with suppress(ConnectionLostError):
            send_message(connection, msgspec.msgpack.encode(Refused(message, is_final)))
