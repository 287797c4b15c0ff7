"""An engine whose ranks are on several machines: which settings are refused, what the report says."""

from __future__ import annotations

from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.foundation.config.parallel import ParallelConfig

_LARGEST_PORT = 65_535


def check_nodes(config: Config, device: str = "cpu") -> None:
    """Refuse what nodes cannot be.

    Raises:
        ConfigError: The message names the flag.
    """
    parallel, headless = config.parallel, config.server.headless
    nodes, node = parallel.nodes, parallel.node_rank
    if parallel.distributed_executor_backend == "ray" and (node or headless):
        name = "node_rank" if node else "headless"
        raise ConfigError(
            f"--{name.replace('_', '-')} with --distributed-executor-backend ray: Ray starts the other nodes. Start "
            "quire serve once, on the machine that is to serve.",
            param=name,
        )
    if nodes < 1:
        raise ConfigError(f"--nnodes {nodes}: must be at least 1.", param="nnodes")
    if not 0 <= node < nodes:
        raise ConfigError(
            f"--node-rank {node}: with --nnodes {nodes} it is 0 to {nodes - 1}, another one on each machine.",
            param="node_rank",
        )
    if node and not headless:
        raise ConfigError(
            f"--node-rank {node}: only the node with rank 0 serves. Start the others by quire serve with --headless.",
            param="node_rank",
        )
    if headless and not node:
        raise ConfigError(
            "--headless: only a node whose --node-rank is 1 or more can do without a server. Give --nnodes and "
            "--node-rank, or leave it out.",
            param="headless",
        )
    if nodes > 1 and device == "cuda":
        name = "nnodes" if parallel.distributed_executor_backend != "ray" else "distributed_executor_backend"
        asked = f"--nnodes {nodes}" if name == "nnodes" else "--distributed-executor-backend ray"
        raise ConfigError(
            f"{asked}: GPUs of several machines are not served yet. Leave it out, or give --device cpu.", param=name
        )
    if nodes > 1:
        _check_several(parallel)


def check_backend(parallel: ParallelConfig, *, is_server: bool) -> None:
    """Refuse Ray where nothing starts nodes by it.

    Raises:
        ConfigError: It names the flag.
    """
    if parallel.distributed_executor_backend == "ray" and not is_server:
        raise ConfigError(
            "--distributed-executor-backend ray: only quire serve starts nodes by Ray. Leave it out.",
            param="distributed_executor_backend",
        )


def _check_several(parallel: ParallelConfig) -> None:
    nodes = parallel.nodes
    if not 1 <= parallel.master_port <= _LARGEST_PORT:
        raise ConfigError(f"--master-port {parallel.master_port}: must be 1 to {_LARGEST_PORT}.", param="master_port")
    if parallel.pipeline_parallel_size % nodes:
        raise ConfigError(
            f"--nnodes {nodes} with --pipeline-parallel-size {parallel.pipeline_parallel_size}: each machine has some "
            f"stages of the pipeline, and all the same number. Make it a multiple of {nodes}; --tensor-parallel-size "
            "divides layers within a machine only.",
            param="nnodes",
        )
    if parallel.data_parallel_size > 1:
        raise ConfigError(
            f"--nnodes {nodes} with --data-parallel-size {parallel.data_parallel_size} is not served: one engine "
            "starts over several machines. Leave one of them out, and let quire route spread requests over servers.",
            param="data_parallel_size",
        )


def node_lines(parallel: ParallelConfig) -> list[str]:
    """Return the report's line about ranks on several machines; no line if all are on one."""
    if parallel.nodes == 1:
        return []
    each = parallel.ranks_of_a_node
    ranks = f"{each} rank{'s' * (each > 1)}"
    return [
        f"nodes       {parallel.nodes}, each with {ranks}; this is node {parallel.node_rank}, and they meet at "
        f"{parallel.master_addr}:{parallel.master_port}"
    ]
