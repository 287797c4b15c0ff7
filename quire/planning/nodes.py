"""An engine whose ranks are on several machines: which settings are refused, what the report says."""

from __future__ import annotations

from quire.config import Config
from quire.config.parallel import ParallelConfig
from quire.errors import ConfigError

_LARGEST_PORT = 65_535


def check_nodes(config: Config, device: str = "cpu") -> None:
    """Refuse what nodes cannot be.

    Raises:
        ConfigError: The message names the flag.
    """
    parallel, headless = config.parallel, config.server.headless
    nodes, node = parallel.nnodes, parallel.node_rank
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
        raise ConfigError(
            f"--nnodes {nodes}: GPUs of several machines are not served yet. Leave it out, or give --device cpu.",
            param="nnodes",
        )
    if nodes > 1:
        _check_several(parallel)


def _check_several(parallel: ParallelConfig) -> None:
    nodes = parallel.nnodes
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
    """That ranks are on several machines."""
    if parallel.nnodes == 1:
        return []
    each = parallel.ranks_of_a_node
    ranks = f"{each} rank{'s' * (each > 1)}"
    return [
        f"nodes       {parallel.nnodes}, each with {ranks}; this is node {parallel.node_rank}, and they meet at "
        f"{parallel.master_addr}:{parallel.master_port}"
    ]
