"""Settings of several nodes that cannot be meant are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.planning.rank_checks import check_backend, check_nodes, node_lines

TWO = {"nnodes": 2, "pipeline_parallel_size": 2}
RAY = {"distributed_executor_backend": "ray"}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        TWO,
        TWO | {"pipeline_parallel_size": 4, "tensor_parallel_size": 2},
        TWO | {"node_rank": 1, "headless": True},
    ],
)
def test_nodes_that_can_be(settings: dict[str, Any]) -> None:
    check_nodes(Config().with_values(**settings))


@pytest.mark.parametrize(
    ("settings", "name", "message"),
    [
        ({"distributed_timeout_seconds": 0}, "distributed_timeout_seconds", "seconds must be 1 or more, got 0"),
        ({"nnodes": 0}, "nnodes", "--nnodes 0: must be at least 1"),
        (TWO | {"node_rank": 2, "headless": True}, "node_rank", "with --nnodes 2 it is 0 to 1"),
        (TWO | {"node_rank": -1}, "node_rank", "--node-rank -1"),
        ({"node_rank": 1}, "node_rank", "with --nnodes 1 it is 0 to 0"),
        (TWO | {"node_rank": 1}, "node_rank", "only the node with rank 0 serves.*--headless"),
        (TWO | {"headless": True}, "headless", "only a node whose --node-rank is 1 or more"),
        ({"headless": True}, "headless", "Give --nnodes and --node-rank"),
        ({"nnodes": 2}, "nnodes", "--nnodes 2 with --pipeline-parallel-size 1: .*Make it a multiple of 2"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, "nnodes", "divides layers within a machine only"),
        (TWO | {"pipeline_parallel_size": 3}, "nnodes", "Make it a multiple of 2"),
        (TWO | {"data_parallel_size": 2}, "data_parallel_size", "--data-parallel-size 2 is not served"),
        (TWO | {"master_port": 0}, "master_port", "--master-port 0: must be 1 to 65535"),
        (TWO | RAY | {"node_rank": 1, "headless": True}, "node_rank", "Ray starts the other nodes"),
        (RAY | {"headless": True}, "headless", "--headless with --distributed-executor-backend ray"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        check_nodes(Config().with_values(**settings))
    assert raised.value.param == name


def test_the_report_says_which_node_this_is() -> None:
    assert node_lines(Config().parallel) == []
    parallel = Config().with_values(**TWO, tensor_parallel_size=2, node_rank=1, master_addr="10.0.0.1").parallel
    assert parallel.ranks_of_a_node == 2
    assert node_lines(parallel) == ["nodes       2, each with 2 ranks; this is node 1, and they meet at 10.0.0.1:29501"]


def test_gpus_of_several_machines_are_refused() -> None:
    with pytest.raises(ConfigError, match="--nnodes 2: GPUs of several machines are not served yet"):
        check_nodes(Config().with_values(**TWO), "cuda")
    with pytest.raises(ConfigError, match="--distributed-executor-backend ray: GPUs of several machines") as raised:
        check_nodes(Config().with_values(**TWO, **RAY), "cuda")
    assert raised.value.param == "distributed_executor_backend"


def test_only_a_server_starts_nodes_by_ray() -> None:
    check_backend(Config().with_values(**RAY).parallel, is_server=True)
    check_backend(Config().with_values(distributed_executor_backend="mp").parallel, is_server=False)
    with pytest.raises(ConfigError, match="only quire serve starts nodes by Ray"):
        check_backend(Config().with_values(**RAY).parallel, is_server=False)


def test_another_backend_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'external_launcher' is not one of mp, uni, ray") as raised:
        Config().with_values(distributed_executor_backend="external_launcher")
    assert raised.value.param == "distributed_executor_backend"
