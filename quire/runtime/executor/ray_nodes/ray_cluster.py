"""A Ray cluster for NodeKeeper: a placement group, and an actor for each node.

The only module that imports Ray. It joins a cluster that runs already, and starts none.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quire.runtime.executor.ray_nodes.node_actor import News, NodeActor
from quire.runtime.executor.ray_nodes.node_keeper import STRATEGY, ClusterNode, Lost, Placement

_NEWS_S = 5.0
"""How long an actor waits for something to say."""


class RayCluster:
    """A NodeCluster on Ray, with an actor for each node.

    Args:
        address: The cluster's, as in RAY_ADDRESS; empty: the cluster that this machine is part of.

    Attributes:
        own_id, own_address: Ray's id and address of this machine.

    Raises:
        ConnectionError: No cluster runs there.
    """

    def __init__(self, address: str) -> None:
        ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
        self.own_id: str = ray.get_runtime_context().get_node_id()
        (self.own_address,) = (node.address for node in self.machines() if node.id == self.own_id)
        self._group: PlacementGroup | None = None
        self._placement: Placement | None = None
        self._launches: dict[int, tuple[bytes, bytes]] = {}
        self._actors: dict[int, Any] = {}
        self._waits_for: dict[Any, int] = {}  # reference to the next news → node

    def machines(self) -> list[ClusterNode]:
        return [
            ClusterNode(node["NodeID"], node["NodeManagerAddress"], node["Resources"].get("CPU", 0.0))
            for node in ray.nodes()
            if node["Alive"]
        ]

    def reserve(self, placement: Placement) -> None:
        """Begin to wait for places; Ray takes a lost node's bundle to another machine by itself."""
        self._placement = placement
        self._group = placement_group(
            placement.bundles,
            strategy=STRATEGY,
            name="quire",
            bundle_label_selector=placement.label_selectors(self.own_id),
        )

    def has_places(self, wait_s: float) -> bool:
        """Whether there are places for all nodes, after `wait_s` seconds at most."""
        assert self._group is not None
        return bool(self._group.wait(wait_s))

    def launch(self, node: int, launch: bytes, key: bytes) -> None:
        """Set what a node will be started with. The arguments are those of NodeActor."""
        self._launches[node] = launch, key

    def start(self, node: int) -> None:
        assert self._group is not None and self._placement is not None, "places come first"
        if (before := self._actors.pop(node, None)) is not None:
            ray.kill(before)
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
        actor_class = ray.remote(NodeActor).options(num_cpus=self._placement.cpus, scheduling_strategy=where)
        self._actors[node] = actor_class.remote(*self._launches[node])
        self._ask(node)

    def news(self, wait_s: float) -> list[tuple[int, News | Lost]]:
        if not self._waits_for:
            time.sleep(wait_s)
            return []
        ready, _ = ray.wait(list(self._waits_for), timeout=wait_s)
        return [(self._waits_for[reference], self._take(reference)) for reference in ready]

    def _take(self, reference: Any) -> News | Lost:
        node = self._waits_for.pop(reference)
        try:
            news: News = ray.get(reference)
        except RayError as error:
            return Lost(_cause(error))
        if news.exit_code is None:
            self._ask(node)
        return news

    def _ask(self, node: int) -> None:
        self._waits_for[self._actors[node].news.remote(_NEWS_S)] = node


def _cause(error: RayError) -> str:
    """The last line of Ray's text that is not indented; the lines before have details."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith((" ", "\t"))]
    return " ".join(lines[-1].split()) if lines else type(error).__name__
