"""What computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.foundation.config.values import check_range


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
