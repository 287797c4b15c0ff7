"""How many KV blocks sequences need, and how many the settings ask for. Knows nothing about memory."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError, MemoryBudgetError
from quire.foundation.config import CacheConfig, Config
from quire.models.spec import ModelSpec
from quire.planning.draft_model import draft_bytes
from quire.scheduling.kvcache.group_windows import GroupWindow, blocks_per_sequence


@dataclass(frozen=True)
class KVDemand:
    """KV blocks that sequences need.

    Attributes:
        groups: How far back each KV group looks.
        rows: Most sequences at once.
        chunk: Most tokens that a sequence moves by in a step.
        block_size: Tokens of a block.
        block_bytes: Bytes of a block; with a draft model's, which has as many.
    """

    groups: tuple[GroupWindow, ...]
    rows: int
    chunk: int
    block_size: int
    block_bytes: int

    @classmethod
    def of(cls, config: Config, spec: ModelSpec) -> KVDemand:
        """Under settings whose dtype and batch are resolved."""
        rows, chunk = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
        assert rows and chunk, "the batch is resolved first"
        block_size = config.cache.block_size
        return cls(group_windows(spec), rows, chunk, block_size, block_bytes(config, spec))

    def blocks_for_one_sequence(self, length: int) -> int:
        """Blocks of a sequence of `length` tokens."""
        return blocks_per_sequence(self.groups, length, self.chunk, self.block_size)

    def blocks_for_all_sequences(self, length: int) -> int:
        """Blocks of as many sequences of `length` tokens as may run at once."""
        return self.rows * self.blocks_for_one_sequence(length)


def group_windows(spec: ModelSpec) -> tuple[GroupWindow, ...]:
    """How far back each of a model's KV groups looks."""
    return tuple(GroupWindow(group.window) for group in spec.kv_groups())


def block_bytes(config: Config, spec: ModelSpec) -> int:
    """Bytes of a KV block, with those of the draft model's block beside it."""
    return spec.kv_block_bytes(config.kv_dtype, config.cache.block_size) + draft_bytes(config).block


def requested_blocks(cache: CacheConfig, block_bytes: int) -> int | None:
    """KV blocks that the settings ask for, by number or by bytes; None if they do not.

    Raises:
        ConfigError, MemoryBudgetError: That is not one block.
    """
    if (blocks := cache.num_gpu_blocks_override) is not None:
        if blocks < 1:
            raise ConfigError("--num-gpu-blocks-override must be at least 1.", param="num_gpu_blocks_override")
        return blocks
    if (requested := cache.kv_cache_memory_bytes) is None:
        return None
    if requested < block_bytes:
        raise MemoryBudgetError(f"--kv-cache-memory-bytes {requested} holds no block of {block_bytes} bytes: raise it.")
    return requested // block_bytes
