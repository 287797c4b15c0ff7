"""Another node of an engine, as the head sees it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quire.errors import EngineDeadError
from quire.foundation.processes.child_main import raise_reported_failure
from quire.foundation.processes.launch import StatusReport
from quire.runtime.executor.nodes.connection import Connection, ConnectionLostError
from quire.runtime.executor.nodes.node_messages import Failed, FromNode, Said, Started, ToNode
from quire.runtime.executor.rank_messages import FromRank


class RemoteNode:
    """Another node's connection, and what is known of the node.

    Args:
        connection: To it.
        number: Which node it is.
        host: Its name.
        address: Where it listens for links.
        ranks: That run on it.
        of: How many ranks there are.
    """

    def __init__(
        self, connection: Connection, number: int, host: str, address: tuple[str, int], ranks: range, of: int
    ) -> None:
        self.connection = connection
        self.address = address
        self.ranks = ranks
        self._number = number
        self._host = host
        self._of = of
        self._pids: list[int] = []
        self._decoder: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
        self._said: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)

    def name(self, rank: int) -> str:
        """What one of the node's ranks is called in messages."""
        process = f"process {self._pids[rank - self.ranks[0]]} on " if self._pids else ""
        return f"Rank {rank} of {self._of} ({process}node {self._number}, {self._host})"

    def post(self, message: ToNode) -> None:
        """Send the node a message.

        Raises:
            EngineDeadError: It is lost.
        """
        try:
            self.connection.post(msgspec.msgpack.encode(message))
        except ConnectionLostError as error:
            raise self._lost(error) from error

    def receive(self, *, readable: bool) -> Iterator[tuple[int, FromRank]]:
        """What the node's ranks have said; sends on the way what is unsent.

        Raises:
            SetupError: A rank's start has failed there.
            EngineDeadError: A rank is gone, or the node is.
        """
        try:
            self.connection.flush()
            messages = self.connection.take() if readable else []
        except ConnectionLostError as lost:
            raise self._lost(lost) from lost
        for encoded in messages:
            match self._decoder.decode(encoded):
                case Said(rank, message):
                    yield rank, self._said.decode(message)
                case Started(pids):
                    self._pids = pids
                case Failed(error, message):
                    if error:
                        raise_reported_failure(StatusReport("failed", error, message))
                    raise EngineDeadError(message)

    def check(self) -> None:
        """Check that the node is there, before it was told to start anything.

        Raises:
            ConnectionLostError: It is not.
        """
        if self.connection.take():
            raise ConnectionLostError("it has said something before it was asked")

    def close(self, patience_s: float = 0.0) -> None:
        """End the connection, once what was posted is sent."""
        self.connection.close(patience_s)

    def _lost(self, error: ConnectionLostError) -> EngineDeadError:
        ranks = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {self.ranks[0]} to {self.ranks[-1]}"
        return EngineDeadError(
            f"Node {self._number} ({self._host}) with {ranks} of {self._of} was lost: {error.message}."
        )
