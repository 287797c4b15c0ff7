"""The KV cache's shape and size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: Literal[8, 16, 32] = 16
    """Tokens a block."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for the KV cache. Default: chosen from the memory there is and what --max-num-seqs can use."""
    enable_prefix_caching: bool = True
    """Share the blocks of equal beginnings between requests."""
    swap_space: float = 4.0
    """GiB of host memory that preempted sequences may be swapped to; 0 for none."""
    num_gpu_blocks_override: int | None = None
    """Exact number of blocks (on a CPU as well), whatever the memory."""
