"""Keeps the other nodes of an engine running: starts each, prints what it says, and starts it again when it is gone.

Where a node runs is the cluster's affair. Knows nothing about engines: these wait for nodes, and say who is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.errors import SETUP_ERRORS, EngineDeadError, SetupError
from quire.foundation.clock import Clock
from quire.foundation.config import Config
from quire.foundation.config.parallel import ParallelConfig
from quire.runtime.executor.ray_nodes.node_actor import News

STRATEGY = "STRICT_SPREAD"
"""The placement group's strategy: no two bundles on the same machine."""
NODE_ID_LABEL = "ray.io/node-id"
"""Label that Ray gives each machine of a cluster."""
SAY_AFTER_S = 5.0
"""How long a node may be without a place before it is logged that it has none."""
MAX_FIRST_STARTS = 3
"""How often a node that was never ready is started."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Seconds before a node is started again: twice as long each time, until one has run for longer than that."""


class ClusterNode(NamedTuple):
    """A machine of Ray's cluster: its id and address in Ray, and all its CPUs, free or not."""

    id: str
    address: str
    cpus: float


def wanted_nodes(parallel: ParallelConfig) -> int:
    """How many nodes a cluster is asked for: --nnodes, or one for each stage of the pipeline."""
    return parallel.pipeline_parallel_size if parallel.nnodes is None else parallel.nnodes


@dataclass(frozen=True)
class Placement:
    """What a placement group asks for: bundle k is for node k, and node 0, the head, is the machine of the server.

    Attributes:
        nodes: How many bundles the group has.
        cpus: The CPUs of each bundle.
        reason: Why there are so many nodes, for messages.
    """

    nodes: int
    cpus: int
    reason: str

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The resources of each bundle."""
        return [{"CPU": float(self.cpus)}] * self.nodes

    def label_selectors(self, own_id: str) -> list[dict[str, str]]:
        """The labels that the machine of each bundle must have; `own_id` is Ray's id of the server's machine."""
        return [{NODE_ID_LABEL: own_id}, *({} for _ in range(self.nodes - 1))]

    def head_shortage(self, cluster: Sequence[ClusterNode], own_id: str) -> str:
        """Why the head can never be on the server's machine; empty: it can."""
        own = next((node for node in cluster if node.id == own_id), None)
        if own is None or own.cpus >= self.cpus:
            return ""
        return (
            f"Ray's node on this machine ({own.address}) has {_cpus(own.cpus)}, and the head needs {self.cpus}: one "
            "for each of its ranks, or as many as --cpu-threads says. Give ray start more by --num-cpus, or lower "
            "--cpu-threads."
        )

    def shortage(self, cluster: Sequence[ClusterNode]) -> str:
        """What the cluster lacks."""
        large = [node.address for node in cluster if node.cpus >= self.cpus]
        has = f"Ray's cluster has {len(large)} node{'s' * (len(large) != 1)} with {_cpus(self.cpus)} or more"
        if large:
            has += f" ({', '.join(large)})"
        needed = f"{self.nodes} are needed: {self.reason}"
        if len(large) < self.nodes:
            return f"{has}, and {needed}"
        return f"{has}, but other programs hold what they have ('ray status' shows it), and {needed}"


def placement_for(config: Config) -> Placement:
    """The placement of an engine with these settings."""
    parallel = config.parallel
    nodes = wanted_nodes(parallel)
    if parallel.nnodes is None:
        reason = f"one for each stage of --pipeline-parallel-size {parallel.pipeline_parallel_size}"
    else:
        reason = f"--nnodes {nodes}"
    return Placement(nodes, parallel.ranks // nodes * (config.device.cpu_threads or 1), reason)


def _cpus(number: float) -> str:
    return f"{number:g} CPU{'s' * (number != 1)}"


class Lost(NamedTuple):
    """A node's actor is gone, perhaps with its machine."""

    why: str


class NodeCluster(Protocol):
    """Where nodes run: RayCluster, or a fake."""

    def machines(self) -> list[ClusterNode]:
        """The machines of the cluster that are alive."""
        ...

    def start(self, node: int) -> None:
        """Begin to start a node, as soon as there is a place for it; an earlier start of the node is ended."""
        ...

    def news(self, wait_s: float) -> list[tuple[int, News | Lost]]:
        """News of nodes that were started, with their numbers; empty after `wait_s` seconds.

        A node without a place has none. A node that is lost, or whose follower is gone, has none until it is started
        again.
        """
        ...


@dataclass
class _Node:
    started_at: float = 0.0
    starts: int = 0
    due_at: float | None = 0.0  # None: it was started
    was_heard: bool = False
    was_ready: bool = False
    said_waiting: bool = False
    last: str = ""
    pause_s: float = FIRST_PAUSE_S


class NodeKeeper:
    """Keeps the other nodes of an engine running: starts each, prints what it says, and starts it again when it is
    gone.

    Args:
        cluster: Where nodes run.
        placement: The placement of all nodes.
        clock: For who is late.
        say: Prints a line about a node, whose number it is given; 0 means the cluster.
    """

    def __init__(
        self, cluster: NodeCluster, placement: Placement, clock: Clock, say: Callable[[int, str], None]
    ) -> None:
        self._cluster = cluster
        self._placement = placement
        self._clock = clock
        self._say = say
        self._nodes = {number: _Node() for number in range(1, placement.nodes)}

    def start_all(self, patience_s: float) -> None:
        """Start all nodes, and wait until they are ready for an engine.

        Raises:
            SetupError: A node has failed, with an error of this class, or could not be started.
            EngineDeadError: A node was not ready in time.
        """
        deadline = self._clock.now() + patience_s
        while missing := [number for number, node in self._nodes.items() if not node.was_ready]:
            if self._clock.now() > deadline:
                raise EngineDeadError(self._too_late(missing, patience_s))
            self.look(0.5)

    def look(self, wait_s: float) -> None:
        """Start nodes that are due, and take news; must be called for as long as the nodes are to run.

        Raises:
            SetupError: A node failed that was never ready.
        """
        now = self._clock.now()
        for number, node in self._nodes.items():
            if node.due_at is not None and node.due_at <= now:
                node.due_at, node.started_at, node.was_heard = None, now, False
                node.starts += 1
                self._cluster.start(number)
        for number, news in self._cluster.news(wait_s):
            match news:
                case News():
                    self._heard(number, self._nodes[number], news)
                case Lost(why):
                    self._lost(number, self._nodes[number], why)
        self._say_who_waits()

    # --- below --------------------------------------------------------------------------------------------------------

    def _heard(self, number: int, node: _Node, news: News) -> None:
        if node.said_waiting and not node.was_heard:
            self._say(0, f"Node {number} has a place on {news.host}")
        node.was_heard, node.said_waiting = True, False
        for line in news.lines:
            self._say(number, line)
        node.was_ready |= news.is_ready
        if news.exit_code is None:
            return
        node.last = f"Node {number} of {self._placement.nodes} ({news.host}): {news.cause}"
        if news.error and not node.was_ready:
            raise SETUP_ERRORS.get(news.error, SetupError)(f"{node.last}.")
        if news.exit_code:
            self._say(0, f"{node.last}; it is started again")
        self._start_again(node)

    def _lost(self, number: int, node: _Node, why: str) -> None:
        node.last = f"Node {number} of {self._placement.nodes} was lost: {why.rstrip('.')}"
        self._say(0, f"{node.last}; Ray gives it another place")
        self._start_again(node)

    def _start_again(self, node: _Node) -> None:
        """Start a node again later.

        Raises:
            SetupError: The node was started often enough, and was never ready.
        """
        if not node.was_ready and node.starts >= MAX_FIRST_STARTS:
            raise SetupError(f"{node.last}. It was started {node.starts} times.")
        now = self._clock.now()
        if now - node.started_at > LONGEST_PAUSE_S:
            node.pause_s = FIRST_PAUSE_S
        node.due_at = now + node.pause_s
        node.pause_s = min(2 * node.pause_s, LONGEST_PAUSE_S)

    def _say_who_waits(self) -> None:
        now = self._clock.now()
        late = [
            number
            for number, node in self._nodes.items()
            if node.due_at is None and not node.was_heard and not node.said_waiting
            if now - node.started_at > SAY_AFTER_S
        ]
        for number in late:
            self._nodes[number].said_waiting = True
            self._say(0, f"Node {number} has no place yet: {self._placement.shortage(self._cluster.machines())}")

    def _too_late(self, missing: list[int], patience_s: float) -> str:
        names = ", ".join(f"Node {number} of {self._placement.nodes}" for number in missing)
        said = [node.last for number, node in self._nodes.items() if number in missing and node.last]
        why = f" {said[-1]}." if said else ""
        if not all(self._nodes[number].was_heard for number in missing):
            why = f" {self._placement.shortage(self._cluster.machines())}."
        return (
            f"{names} did not start within {patience_s:g} s.{why} See 'ray status', or give more time by "
            "--distributed-timeout-seconds."
        )
