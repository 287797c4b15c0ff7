"""The ranks of an engine on several machines: its own processes, and the processes of nodes that have joined.

Plans go to each node once, in one message; streams and sampled tokens go between ranks directly. A node that is lost is
an EngineDeadError that names it.
"""

from __future__ import annotations

import secrets
import selectors
import socket
from contextlib import ExitStack, suppress
from dataclasses import replace

import msgspec

from quire.compute.mesh import mesh_of
from quire.errors import EngineDeadError
from quire.foundation.clock import Clock
from quire.foundation.config import Config, ServerConfig, environment
from quire.foundation.processes.launch import GroupEnds
from quire.models.spec import spec_of
from quire.runtime.executor.nodes.gate import Gate
from quire.runtime.executor.nodes.link_setup import LinkSetup
from quire.runtime.executor.nodes.node_messages import End, ForRanks, Launch
from quire.runtime.executor.nodes.roll_call import RollCall
from quire.runtime.executor.rank_links import Crossings, Link, ranks_of, token_bytes
from quire.runtime.executor.rank_messages import FromRank, ToRanks
from quire.runtime.executor.rank_processes import STOP_TIMEOUT_S, RankProcesses, stream_bytes

_LOOK_S = 0.5


class HeadRanks:
    """The ranks of an engine on all nodes, as the head sees them; `number` says how many there are."""

    def __init__(self, config: Config, clock: Clock) -> None:
        parallel = config.parallel
        key = environment.node_key(parallel.node_key_file)
        self._mesh = mesh_of(parallel)
        self.number = self._mesh.size
        self._encoder = msgspec.msgpack.Encoder()
        with ExitStack() as opened, Gate(parallel.master_addr, parallel.master_port, key) as gate:
            self._nodes = RollCall(config, clock).wait(gate)
            for node in self._nodes:
                opened.callback(node.close)
            session = secrets.token_hex(16)
            here = (parallel.master_addr, gate.port)
            launch = Launch(for_others(config), session, [here, *(node.address for node in self._nodes)])
            for node in self._nodes:
                node.post(launch)
            setup = LinkSetup(self._mesh, 0, parallel.nodes, session, launch.addresses, key)
            sockets = setup.open(gate, self._check)
            self._local = ranks_with_links(config, clock, sockets)
            opened.pop_all()
        self._selector = selectors.EpollSelector()
        self._selector.register(self._local, selectors.EVENT_READ, None)
        for node in self._nodes:
            self._selector.register(node.connection, selectors.EVENT_READ, node)

    def name(self, rank: int) -> str:
        """What a rank is called in messages."""
        node = next((node for node in self._nodes if rank in node.ranks), None)
        return self._local.name(rank) if node is None else node.name(rank)

    def broadcast(self, message: ToRanks) -> None:
        """Send a message to all ranks: first to ranks on other nodes, which take longer to reach."""
        encoded = self._encoder.encode(message)
        for node in self._nodes:
            node.post(ForRanks(encoded))
        self._local.broadcast_encoded(encoded)

    def receive(self, wait: float | None) -> list[tuple[int, FromRank]]:
        """What ranks on all nodes have said, each with its number; empty after `wait` seconds.

        Raises:
            SetupError: A rank's start has failed.
            EngineDeadError: A rank or node is gone, or stuck.
        """
        step = _LOOK_S if wait is None else min(wait, _LOOK_S)
        while True:
            self._watch_unsent()
            ready = {key.data: events for key, events in self._selector.select(step)}
            received = [
                said
                for node in self._nodes
                for said in node.receive(readable=bool(ready.get(node, 0) & selectors.EVENT_READ))
            ]
            received += self._local.receive(0.0)
            if received or wait is not None:
                return received

    def close(self, *, at_once: bool) -> None:
        """End all ranks: in order, after Stop was broadcast, or at once."""
        if not at_once:
            for node in self._nodes:
                with suppress(EngineDeadError):  # the node has ended already
                    node.post(End())
        self._local.close(at_once=at_once)
        for node in self._nodes:
            node.close(0.0 if at_once else STOP_TIMEOUT_S)
        self._selector.close()

    # --- below --------------------------------------------------------------------------------------------------------

    def _watch_unsent(self) -> None:
        for node in self._nodes:
            events = selectors.EVENT_READ | selectors.EVENT_WRITE * node.connection.has_unsent
            self._selector.modify(node.connection, events, node)

    def _check(self) -> None:
        for node in self._nodes:
            assert not list(node.receive(readable=True)), "ranks wait for links first"


Ranks = RankProcesses | HeadRanks
"""All ranks of an engine. `receive` has to be called now and then."""


def start_ranks(config: Config, clock: Clock, group: GroupEnds | None = None) -> Ranks:
    """Start the ranks of an engine; `group` is what they share with ranks of other engines.

    Raises:
        EngineDeadError: A node did not join, or was lost.
        ConfigError: This machine cannot be the head.
    """
    if config.parallel.nodes > 1:
        return HeadRanks(config, clock)
    return RankProcesses(config, clock, group=group)


def for_others(config: Config) -> Config:
    """The settings without secrets and what only this machine needs to know."""
    return replace(
        config,
        server=ServerConfig(),
        model=replace(config.model, hf_token=None),
        parallel=replace(config.parallel, node_key_file=None),
    )


def ranks_with_links(config: Config, clock: Clock, sockets: dict[Link, socket.socket]) -> RankProcesses:
    """Start a node's ranks with their links, which only the ranks have from then on."""
    parallel = config.parallel
    mesh, nodes = mesh_of(parallel), parallel.nodes
    spec = spec_of(config.model)
    crossings = Crossings(
        ranks_of(parallel.node_rank, mesh, nodes),
        nodes,
        {link: connection.fileno() for link, connection in sockets.items()},
        stream_bytes(config, spec.hidden),
        token_bytes(config.scheduler.max_num_seqs or 0),
    )
    try:
        return RankProcesses(config, clock, crossings, f" on node {parallel.node_rank}, {socket.gethostname()}")
    finally:
        for connection in sockets.values():
            connection.close()
