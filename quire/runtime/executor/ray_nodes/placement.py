"""Where Ray is to put the nodes of an engine: how many there are, what each asks for, and what a cluster lacks.

Pure; knows Ray's terms, but not Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.foundation.config import Config
from quire.foundation.config.parallel import ParallelConfig

STRATEGY = "STRICT_SPREAD"
"""The placement group's strategy: no two bundles on the same machine."""
NODE_ID_LABEL = "ray.io/node-id"
"""Label that Ray gives each machine of a cluster."""


class ClusterNode(NamedTuple):
    """A machine of Ray's cluster.

    Attributes:
        id: Ray's.
        address: By which Ray knows it.
        cpus: That it has, also those that are taken.
    """

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
        nodes: How many bundles it has.
        cpus: Of each.
        reason: Why there are so many, for messages.
    """

    nodes: int
    cpus: int
    reason: str

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Resources of each bundle."""
        return [{"CPU": float(self.cpus)}] * self.nodes

    def label_selectors(self, own_id: str) -> list[dict[str, str]]:
        """Which labels the machine of each bundle has; `own_id` is the server's."""
        return [{NODE_ID_LABEL: own_id}, *({} for _ in range(self.nodes - 1))]

    def head_shortage(self, cluster: Sequence[ClusterNode], own_id: str) -> str:
        """Why the head can never be on its own machine; empty: it can."""
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
