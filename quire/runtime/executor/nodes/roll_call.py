"""The head waits for the other nodes of an engine, refuses nodes that do not fit, and talks to the others."""

from __future__ import annotations

import hashlib
import logging
import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from quire.compute.mesh import mesh_of
from quire.errors import EngineDeadError
from quire.foundation.clock import Clock
from quire.foundation.config import Config
from quire.foundation.config.parallel import ParallelConfig
from quire.foundation.processes.child_main import raise_reported_failure
from quire.foundation.processes.launch import StatusReport
from quire.runtime.executor.nodes.connection import Connection, ConnectionLostError
from quire.runtime.executor.nodes.gate import Arrival, Gate
from quire.runtime.executor.nodes.link_setup import refuse
from quire.runtime.executor.nodes.node_messages import Failed, FromNode, Join, Said, Started, ToNode
from quire.runtime.executor.rank_links import ranks_of
from quire.runtime.executor.rank_messages import FromRank
from quire.version import __version__

NODES_PATIENCE_S = 300.0
"""How long the head waits for the last node."""
SAY_AFTER_S = 5.0
"""How long the head waits for other nodes before it says that it waits."""
_LOOK_S = 0.5
_FROM_NODE: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
_FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_HASHED = ("config.json",)
_SIZED = (".safetensors", ".gguf")
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class RemoteNode:
    """The connection to another node, and what is known of the node.

    Attributes:
        number: The node's number.
        host: The machine's name.
        address: Where the node listens for links.
        ranks: The ranks that run on it.
        of: How many ranks the engine has.
        pids: The process ids of its ranks, once it has started them.
    """

    connection: Connection
    number: int
    host: str
    address: tuple[str, int]
    ranks: range
    of: int
    pids: list[int] = field(default_factory=list)

    def name(self, rank: int) -> str:
        """What one of the node's ranks is called in messages."""
        process = f"process {self.pids[rank - self.ranks[0]]} on " if self.pids else ""
        return f"Rank {rank} of {self.of} ({process}node {self.number}, {self.host})"

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
        """Send what is unsent, and yield what the node's ranks have said.

        Raises:
            SetupError: A rank's start has failed there.
            EngineDeadError: A rank or the node is gone.
        """
        try:
            self.connection.flush()
            messages = self.connection.take() if readable else []
        except ConnectionLostError as lost:
            raise self._lost(lost) from lost
        for encoded in messages:
            match _FROM_NODE.decode(encoded):
                case Said(rank, message):
                    yield rank, _FROM_RANK.decode(message)
                case Started(pids):
                    self.pids = pids
                case Failed(error, message):
                    if error:
                        raise_reported_failure(StatusReport("failed", error, message))
                    raise EngineDeadError(message)

    def check(self) -> None:
        """Check that a node is there which has nothing to say yet.

        Raises:
            ConnectionLostError: The node is gone.
        """
        if self.connection.take():
            raise ConnectionLostError("it has said something before it was asked")

    def close(self, patience_s: float = 0.0) -> None:
        """End the connection, once what was posted is sent."""
        self.connection.close(patience_s)

    def _lost(self, error: ConnectionLostError) -> EngineDeadError:
        ranks = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {self.ranks[0]} to {self.ranks[-1]}"
        return EngineDeadError(f"Node {self.number} ({self.host}) with {ranks} of {self.of} was lost: {error.message}.")


def shape_of(parallel: ParallelConfig) -> str:
    """The flags that must have the same values on all nodes, with these values."""
    experts = " --enable-expert-parallel" if parallel.enable_expert_parallel else ""
    return (
        f"--nnodes {parallel.nodes} --tensor-parallel-size {parallel.tensor_parallel_size} "
        f"--pipeline-parallel-size {parallel.pipeline_parallel_size}{experts}"
    )


def model_fingerprint(model: str) -> str:
    """A digest of a model's config and of its weight files' names and sizes, which says whether two machines have the
    same model."""
    path = Path(model)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        if file.name in _HASHED:
            digest.update(file.read_bytes())
        elif file.suffix in _SIZED:
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.hexdigest()


class RollCall:
    """Waits until nodes 1, 2, … have joined."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._parallel = config.parallel
        self._mesh = mesh_of(config.parallel)
        self._model = model_fingerprint(config.model.model)
        self._clock = clock
        self._patience_s = float(config.parallel.distributed_timeout_seconds or NODES_PATIENCE_S)
        self._joined: dict[int, RemoteNode] = {}
        self._last_refusal = ""

    def wait(self, gate: Gate) -> list[RemoteNode]:
        """Wait for the other nodes, and return them in their order.

        Raises:
            EngineDeadError: A node did not come in time; the message names it.
        """
        began, said = self._clock.now(), False
        try:
            while missing := [node for node in range(1, self._parallel.nodes) if node not in self._joined]:
                waited = self._clock.now() - began
                if waited > self._patience_s:
                    raise EngineDeadError(self._too_late(missing, gate))
                if waited > SAY_AFTER_S and not said:
                    said = True
                    _log.warning("waiting for node(s) %s at port %d", ", ".join(map(str, missing)), gate.port)
                try:
                    self._take(gate.arrivals.get(timeout=_LOOK_S))
                except queue.Empty:
                    self._forget_lost()
        except BaseException:
            for node in self._joined.values():
                node.close()
            raise
        return [self._joined[node] for node in sorted(self._joined)]

    def _take(self, arrival: Arrival) -> None:
        join = arrival.message
        if not isinstance(join, Join):  # a link of an engine before
            arrival.connection.close()
            return
        self._forget_lost()
        if (why := self._final_refusal(join)) or join.node in self._joined:
            message = why or f"another machine has joined as node {join.node}: give each a --node-rank of its own"
            self._last_refusal = f"{join.host} ({arrival.host}) was refused: {message}"
            _log.warning("%s", self._last_refusal)
            refuse(arrival.connection, message, is_final=bool(why))
            return
        ranks = ranks_of(join.node, self._mesh, self._parallel.nodes)
        self._joined[join.node] = RemoteNode(
            Connection(arrival.connection), join.node, join.host, (arrival.host, join.port), ranks, self._mesh.size
        )

    def _final_refusal(self, join: Join) -> str:
        """Why a node can never be taken; empty: it can."""
        if join.version != __version__:
            return f"it runs Quire {join.version}, the head {__version__}: install the same version on all nodes"
        if join.shape != (own := shape_of(self._parallel)):
            return f"it was started with {join.shape}, the head with {own}: give the same on all nodes"
        if not 1 <= join.node < self._parallel.nodes:
            return f"there is no node {join.node}: --node-rank is 1 to {self._parallel.nodes - 1}"
        if join.model != self._model:
            return "its model's files are not the head's: give all nodes the same model, of the same revision"
        return ""

    def _forget_lost(self) -> None:
        """Forget nodes that have joined and were lost before the others came."""
        for number, node in list(self._joined.items()):
            try:
                node.check()
            except ConnectionLostError:
                node.close()
                del self._joined[number]

    def _too_late(self, missing: list[int], gate: Gate) -> str:
        names = ", ".join(f"Node {node} of {self._parallel.nodes}" for node in missing)
        refused = self._last_refusal or gate.last_refusal
        last = f" The last one that tried: {refused}." if refused else ""
        advice = f"Start quire serve there with --node-rank {missing[0]} --headless"
        if self._parallel.distributed_executor_backend == "ray":
            advice = "See above, and 'ray status', why Ray has not started it"
        return (
            f"{names} did not join within {self._patience_s:g} s at {self._parallel.master_addr}:{gate.port}. "
            f"{advice}, or give it more time by --distributed-timeout-seconds.{last}"
        )
