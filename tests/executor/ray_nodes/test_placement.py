"""How many nodes Ray is asked for, what each needs, and what is said of a cluster that has not enough."""

from __future__ import annotations

from typing import Any

import pytest

from quire.foundation.config import Config
from quire.runtime.executor.ray_nodes.node_keeper import NODE_ID_LABEL, ClusterNode, Placement, placement_for

HEAD = ClusterNode("a", "10.0.0.1", 4.0)
SECOND = ClusterNode("b", "10.0.0.2", 2.0)
SMALL = ClusterNode("c", "10.0.0.3", 1.0)


@pytest.mark.parametrize(
    ("settings", "nodes", "cpus"),
    [
        ({}, 1, 1),
        ({"tensor_parallel_size": 2}, 1, 2),
        ({"pipeline_parallel_size": 3}, 3, 1),
        ({"pipeline_parallel_size": 3, "tensor_parallel_size": 2}, 3, 2),
        ({"pipeline_parallel_size": 4, "nnodes": 2}, 2, 2),
        ({"pipeline_parallel_size": 4, "nnodes": 1}, 1, 4),
        ({"pipeline_parallel_size": 4, "nnodes": 2, "cpu_threads": 8}, 2, 16),
    ],
)
def test_a_node_for_each_stage_or_as_many_as_were_asked_for(settings: dict[str, Any], nodes: int, cpus: int) -> None:
    placement = placement_for(Config().with_values(**settings, distributed_executor_backend="ray"))
    assert (placement.nodes, placement.cpus) == (nodes, cpus)
    assert placement.bundles == [{"CPU": cpus}] * nodes


def test_the_head_is_on_the_machine_of_the_server() -> None:
    assert Placement(3, 1, "").label_selectors("a") == [{NODE_ID_LABEL: "a"}, {}, {}]


def test_a_machine_that_can_never_be_the_head() -> None:
    cluster = [HEAD, SMALL]
    assert Placement(2, 4, "").head_shortage(cluster, "a") == ""
    why = Placement(2, 2, "").head_shortage(cluster, "c")
    assert "on this machine (10.0.0.3) has 1 CPU, and the head needs 2" in why


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ([HEAD, SECOND, SMALL], "has 2 nodes with 2 CPUs or more (10.0.0.1, 10.0.0.2), and 3 are needed: --nnodes 3"),
        ([HEAD], "has 1 node with 2 CPUs or more (10.0.0.1), and 3 are needed"),
        ([SMALL], "has 0 nodes with 2 CPUs or more, and 3 are needed"),
        ([HEAD, SECOND, SECOND], "but other programs hold what they have ('ray status' shows it), and 3 are needed"),
    ],
)
def test_what_is_missing_is_named(cluster: list[ClusterNode], said: str) -> None:
    assert said in Placement(3, 2, "--nnodes 3").shortage(cluster)
