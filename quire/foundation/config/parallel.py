"""The devices: which they are, how a model is divided over them, and how many engines serve it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.foundation.config.values import check_range

ExecutorBackend = Literal["mp", "uni", "ray"]


@dataclass(frozen=True)
class ParallelConfig:
    """The ranks that compute one model together, each in a process, and the engines behind one address."""

    tensor_parallel_size: int = 1
    """Ranks that divide every layer: each has a part of the weights and of the KV cache. On GPUs of one host each takes
    a card; on a CPU they share its cores. Short: -tp."""
    pipeline_parallel_size: int = 1
    """Ranks that divide the model's layers, each with some behind one another; times --tensor-parallel-size. Short:
    -pp."""
    data_parallel_size: int = 1
    """Engines that serve the model behind one address, each a process with the whole model; a request goes to the one
    that has its prefix and is not busier than the others. On a CPU they share cores and memory, on GPUs each takes the
    next card, or as many as it has ranks. Only `quire serve` has more than 1. Short: -dp."""
    enable_expert_parallel: bool = False
    """Give each rank of --tensor-parallel-size whole experts of a mixture, in place of a part of every expert; on a CPU
    also over the ranks of all engines of --data-parallel-size. All else stays divided as it is. Short: -ep."""
    distributed_timeout_seconds: int | None = None
    """Seconds that ranks wait for the last one of them, after which the engine ends and says which. Default: at
    the start 300 after the first one, and 20 within a step."""

    distributed_executor_backend: ExecutorBackend | None = None
    """Who starts the ranks on other machines. ray: a Ray cluster that runs already, one machine for each stage of
    --pipeline-parallel-size, or --nnodes of them (pip install 'quire[ray]'). mp and uni change nothing: ranks are
    processes, and each machine starts its own, see --nnodes."""
    nnodes: int | None = None
    """Machines that the ranks of one engine are on, each with as many stages of --pipeline-parallel-size. Give the same
    on all. Default: 1; with Ray one for each stage. Short: -n."""
    node_rank: int = 0
    """Which of them this is: 0 the head, which serves; the others need --headless. Short: -r."""
    master_addr: str = "127.0.0.1"
    """Address of the head: it listens there while an engine starts, and the others connect to it. With Ray the default
    is the one by which Ray knows it."""
    master_port: int = 29501
    """Port of the head. With Ray it is another one if this is taken."""
    node_key_file: str | None = None
    """File with the key that all nodes share, 16 characters or more. Default: the variable QUIRE_NODE_KEY. With several
    nodes there has to be one; with Ray a random one is made."""

    def __post_init__(self) -> None:
        check_range(self, 1, None, "distributed_timeout_seconds")

    @property
    def ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def engines_share_experts(self) -> bool:
        """Whether experts are divided among the ranks of several engines."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def nodes(self) -> int:
        return 1 if self.nnodes is None else self.nnodes

    @property
    def ranks_of_a_node(self) -> int:
        return self.ranks // self.nodes


@dataclass(frozen=True)
class DeviceConfig:
    """The device and how steps are launched on it."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: an NVIDIA GPU if there is one that torch can use, else the processor."""
    enforce_eager: bool = False
    """Launch every kernel by itself instead of replaying recorded CUDA graphs. Slower; for finding faults."""
    max_cudagraph_capture_size: int | None = None
    """Most tokens of a step that is replayed from a CUDA graph, with prompts in it 512 at most; 0 is --enforce-eager.
    Default: 512."""
    cpu_threads: int | None = None
    """Threads that compute on a CPU. Default: as many as physical cores that affinity and cgroup quota allow. What is
    too little to share is computed by one of them."""

    def __post_init__(self) -> None:
        check_range(self, 1, None, "cpu_threads")
