"""The head waits for the other nodes of an engine, and refuses those that do not fit."""

from __future__ import annotations

import hashlib
import logging
import queue
from collections.abc import Iterator
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
_HASHED = ("config.json",)
_SIZED = (".safetensors", ".gguf")
_log = logging.getLogger(__name__)


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


def shape_of(parallel: ParallelConfig) -> str:
    """What has to be the same on all nodes, as flags."""
    experts = " --enable-expert-parallel" if parallel.enable_expert_parallel else ""
    return (
        f"--nnodes {parallel.nodes} --tensor-parallel-size {parallel.tensor_parallel_size} "
        f"--pipeline-parallel-size {parallel.pipeline_parallel_size}{experts}"
    )


def model_fingerprint(model: str) -> str:
    """A digest of a model's config and of its weight files' names and sizes: two machines have the same one if they
    have the same model, wherever it lies."""
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
    """Waits until nodes 1, 2, … have joined.

    Args:
        config: Resolved settings.
        clock: For how long it waits.
    """

    def __init__(self, config: Config, clock: Clock) -> None:
        self._parallel = config.parallel
        self._mesh = mesh_of(config.parallel)
        self._model = model_fingerprint(config.model.model)
        self._clock = clock
        self._patience_s = float(config.parallel.distributed_timeout_seconds or NODES_PATIENCE_S)
        self._joined: dict[int, RemoteNode] = {}
        self._last_refusal = ""

    def wait(self, gate: Gate) -> list[RemoteNode]:
        """Wait for the other nodes; returns them in their order.

        Raises:
            EngineDeadError: One did not come in time; the message names it.
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
