"""The KV cache's shape and size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.foundation.config.kv_cache_dtype import KVCacheDtype

UTILIZATION = 0.9
"""Share of memory that the engine may take where none was asked for."""

BlockSize = Literal[8, 16, 32]


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: BlockSize = 16
    """Tokens a block."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Of keys and values. auto: as --dtype. fp8 (which is fp8_e4m3), fp8_e5m2 and int8 hold twice as many tokens as
    bfloat16, with a scale for each KV head: the checkpoint's, or else chosen at the start by what a built-in text
    brings."""
    gpu_memory_utilization: float | None = None
    """Share of memory that the engine may take: weights and activations first, the KV cache at most the rest. On a CPU,
    of what is available at the start. Default: 0.9, of which the KV cache leaves half free on a CPU."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for the KV cache, whatever the memory."""
    enable_prefix_caching: bool = True
    """Share the blocks of equal beginnings between requests."""
    swap_space: float = 4.0
    """GiB of host memory that preempted sequences may be swapped to, as far as there is memory; 0 for none. For a
    GPU, all of it is taken in the first seconds after the start."""
    num_gpu_blocks_override: int | None = None
    """Exact number of blocks (on a CPU as well), whatever the memory."""

    @property
    def memory_share(self) -> float:
        """Share of memory that the engine may take, asked for or not."""
        return UTILIZATION if self.gpu_memory_utilization is None else self.gpu_memory_utilization
