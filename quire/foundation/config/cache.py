"""The KV cache: its shape, its size, and the types of its elements.

Quantized keys and values are divided by a scale: for each KV head of each layer, one for the keys and one for the
values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.foundation.config.values import check_range

KVCacheDtype = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]
"""As --kv-cache-dtype says it."""
QUANTIZED = ("fp8_e4m3", "fp8_e5m2", "int8")
"""Element types of 8 bits, with scales."""
UTILIZATION = 0.9
"""Default share of memory that the engine may take."""

BlockSize = Literal[8, 16, 32, 64, 128]
StateCacheMode = Literal["align", "none"]
STATE_SPACING = 1024
"""Default number of tokens between two checkpoints of a state, rounded up to whole blocks."""


def is_quantized(kv_cache_dtype: KVCacheDtype) -> bool:
    """Whether elements have 8 bits, whatever the model's type."""
    return element_dtype(kv_cache_dtype, "") in QUANTIZED


def element_dtype(kv_cache_dtype: KVCacheDtype, dtype: str) -> str:
    """The name of an element's type. By default it is the model's `dtype`."""
    if kv_cache_dtype == "auto":
        return dtype
    return "fp8_e4m3" if kv_cache_dtype == "fp8" else kv_cache_dtype


def element_bytes(name: str, dense: dict[str, int]) -> int:
    """Bytes of an element of this type. `dense` has the bytes of the types that a model may have."""
    return 1 if name in QUANTIZED else dense[name]


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
    prompt_cache_share: float = 0.2
    """Share of the KV cache that may keep the prefixes of sessions between their turns: of requests with session_id,
    prompt_cache_key or another wish about the cache, for as long as they ask. These blocks are taken last. 0: none."""
    swap_space: float = 4.0
    """GiB of host memory that preempted sequences may be swapped to, as far as there is memory; 0 for none. For a
    GPU, all of it is taken in the first seconds after the start."""
    kv_offloading_size: float | None = None
    """GiB of host memory for KV blocks that the prefix cache has no room for on the device, of all ranks together. They
    are loaded back where that is quicker than computing them again. Preempted sequences are swapped to the same memory,
    in place of --swap-space. Default: none."""
    kv_disk_path: str | None = None
    """Directory for KV blocks on disk, of this server alone: what comes to the host is written there as well, up to
    --kv-disk-size, and found again after a restart. Needs --kv-offloading-size. Default: none."""
    kv_disk_size: float = 64.0
    """GiB that the blocks in --kv-disk-path may take."""
    num_gpu_blocks_override: int | None = None
    """Exact number of blocks (on a CPU as well), whatever the memory."""
    mamba_cache_mode: StateCacheMode = "align"
    """Of models with recurrent layers, which keep a state of each sequence. align: keep checkpoints of states at the
    ends of blocks, at which prefixes can be shared. none: keep none, so nothing is shared."""
    mamba_block_size: int | None = None
    """Tokens between two checkpoints of a state, a multiple of --block-size; the ends of prompts and of outputs have
    one besides. Default: 1,024."""
    mamba_cache_share: float = 0.25
    """Share of the memory for KV blocks and checkpoints that checkpoints may take. The states of --max-num-seqs
    sequences come before both."""
    num_states_override: int | None = None
    """Exact number of states, of sequences and checkpoints together (on a CPU as well), whatever the memory."""

    def __post_init__(self) -> None:
        check_range(self, 0.0, 1.0, "prompt_cache_share")

    def most_retained(self, num_blocks: int) -> int:
        """How many of so many blocks may be kept for sessions."""
        return int(num_blocks * self.prompt_cache_share) if self.enable_prefix_caching else 0

    def host_bytes(self, ranks: int) -> int:
        """Bytes of host memory for blocks that each of so many ranks is to have."""
        gib = self.swap_space if self.kv_offloading_size is None else self.kv_offloading_size / ranks
        return int(gib * 2**30)

    @property
    def memory_share(self) -> float:
        """Share of memory that the engine may take, or the default share."""
        return UTILIZATION if self.gpu_memory_utilization is None else self.gpu_memory_utilization

    @property
    def state_spacing(self) -> int:
        """Tokens between two checkpoints of a state."""
        return self.mamba_block_size or -(-STATE_SPACING // self.block_size) * self.block_size
