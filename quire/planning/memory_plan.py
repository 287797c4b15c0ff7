"""How memory is shared out: how many KV blocks there are, how long a sequence may be, how much may be swapped.

From what was asked, what all sequences could use, and the memory that is available. On a CPU a share of it
(`--gpu-memory-utilization`) holds weights and activations first, and the KV cache gets at most the rest. Nobody asked
for all of that when no share is given: then it gets at most half of the rest, since pages it has once written stay
taken, and a machine that swaps is slower than an engine that preempts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.config import CacheConfig, Config
from quire.config.cache import UTILIZATION
from quire.errors import ConfigError, MemoryBudgetError
from quire.kvcache.groups import GroupReach, blocks_of
from quire.models.spec import ModelSpec
from quire.planning.footprint import Footprint, activation_bytes
from quire.planning.step_limits import StepLimits

GIB = 2**30
AUTO_LENGTH = -1
"""`--max-model-len -1` is `auto`."""
CEILING = 0.5
"""Of what is left beside weights and activations, unless a utilization is given; but always room for one sequence."""
SWAP_SHARE = 0.5
"""Of what is left beside everything else, at most."""


@dataclass(frozen=True)
class Sharing:
    """How memory is shared out.

    Attributes:
        length: Most tokens of a sequence.
        blocks: KV blocks, the dummy not counted.
        swap_blocks: Blocks of the host pool.
        footprint: In bytes.
        reason: For the number of blocks.
        estimated: The device will say how many blocks there are.
    """

    length: int
    blocks: int
    swap_blocks: int
    footprint: Footprint
    reason: str
    estimated: bool = False


def share_out(config: Config, spec: ModelSpec, available: int) -> Sharing:
    """Decide, from settings whose dtype and batch are resolved.

    Args:
        available: Bytes of memory.

    Raises:
        ConfigError: A setting cannot be meant.
        MemoryBudgetError: One sequence of the length that was asked for does not fit; the message names the flags.
    """
    budget = _Budget(config, spec, available)
    asked, limit = config.model.max_model_len, spec.max_model_len
    if asked == "auto" or asked == AUTO_LENGTH:
        length = max(2, most(budget.fits_ceiling, limit))
    else:
        length = asked or limit
    if not budget.fits(length):
        raise budget.too_small(length)
    blocks, reason = budget.blocks(length)
    footprint = budget.footprint(length, blocks)
    swap_blocks = budget.swap_blocks(length, footprint)
    swap_space = swap_blocks * budget.block_bytes
    footprint = Footprint(footprint.weights, footprint.activations, footprint.kv_cache, swap_space)
    return Sharing(length, blocks, swap_blocks, footprint, reason)


class _Budget:
    """What fits, for every length that a sequence may have."""

    def __init__(self, config: Config, spec: ModelSpec, available: int) -> None:
        self._cache, self._spec, self._dtype = config.cache, spec, config.model.dtype
        scheduler = config.scheduler
        assert scheduler.max_num_seqs and scheduler.max_num_batched_tokens, "the batch is resolved first"
        self._rows, self._tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        self._groups = reaches_of(spec)
        self._weights = spec.weight_bytes(self._dtype)
        self._utilization = config.cache.gpu_memory_utilization
        self._share = share_of_memory(config.cache)
        self._available = available
        self.block_bytes = spec.kv_block_bytes(self._dtype, self._cache.block_size)
        self._asked = asked_blocks(config.cache, self.block_bytes)

    def fits(self, length: int) -> bool:
        """Whether a sequence of `length` tokens fits; an exact number of blocks is never doubted."""
        if self._cache.num_gpu_blocks_override is not None:
            return True
        return self._needed(length) <= (self._room(length) if self._asked is None else self._asked)

    def fits_ceiling(self, length: int) -> bool:
        """Whether it does without lifting the ceiling."""
        return self._needed(length) <= (self._ceiling(length) if self._asked is None else self._asked)

    def blocks(self, length: int) -> tuple[int, str]:
        """How many there are, and why."""
        if self._asked is not None:
            return self._asked, "as asked"
        wanted, needed = self._wanted(length), self._needed(length)
        blocks = min(wanted, max(self._ceiling(length), needed))
        share = f"{self._share:.0%} of the memory available, less weights and activations"
        if blocks == wanted:
            return blocks, "all sequences at full length"
        if self._utilization is not None:
            return blocks, share
        if blocks == needed:
            return blocks, "one sequence at full length"
        return blocks, f"{CEILING:.0%} of {share}, so that nothing swaps; --gpu-memory-utilization {UTILIZATION} for it"

    def footprint(self, length: int, blocks: int) -> Footprint:
        """What all of it takes, with `blocks` blocks."""
        step = StepLimits(self._rows, self._tokens, length)
        activations = activation_bytes(self._spec, self._dtype, self._cache.block_size, step, blocks)
        return Footprint(self._weights, activations, (blocks + 1) * self.block_bytes)

    def swap_blocks(self, length: int, footprint: Footprint) -> int:
        """Blocks of the host pool: what was asked, of what is still left and of any use."""
        left = max(0, int(self._share * self._available) - footprint.total)
        asked = min(int(self._cache.swap_space * GIB), int(SWAP_SHARE * left))
        return max(0, min(asked // self.block_bytes, self._wanted(length)))

    def too_small(self, length: int) -> MemoryBudgetError:
        """What to say when a sequence of `length` tokens does not fit."""
        longest = most(self.fits, length)
        auto = f"--max-model-len auto (here {longest:,} tokens)" if longest > 1 else "a smaller model"
        needs = f"One sequence of {length:,} tokens needs {size(self._needed(length) * self.block_bytes)} of KV cache"
        if self._asked is not None:
            return MemoryBudgetError(
                f"{needs}, more than --kv-cache-memory-bytes {self._cache.kv_cache_memory_bytes}: raise it, or give "
                f"{auto}."
            )
        without = self.footprint(length, 0)
        left = max(0, int(self._share * self._available) - without.total)
        return MemoryBudgetError(
            f"{needs}; of {self._share:.0%} of {size(self._available)} available, weights take {size(without.weights)} "
            f"and activations {size(without.activations)}, so {size(left)} are left: give {auto}, raise "
            "--gpu-memory-utilization, or free memory."
        )

    def _needed(self, length: int) -> int:
        """Blocks of one sequence."""
        return blocks_of(self._groups, length, self._tokens, self._cache.block_size)

    def _wanted(self, length: int) -> int:
        """Blocks that all sequences together can use."""
        return self._rows * self._needed(length)

    def _room(self, length: int) -> int:
        """Blocks that fit into the share of memory."""
        return self._blocks_in(self._share * self._available, length)

    def _ceiling(self, length: int) -> int:
        """Blocks that are taken without being asked for."""
        share, rest = self._share * self._available, self.footprint(length, 0).total
        return self._blocks_in(share if self._utilization is not None else rest + CEILING * (share - rest), length)

    def _blocks_in(self, memory: float, length: int) -> int:
        """The most blocks with which everything takes at most so many bytes."""
        return most(lambda n: self.footprint(length, n).total <= memory, max(0, int(memory)) // self.block_bytes)


def share_of_memory(cache: CacheConfig) -> float:
    """The share that the engine may take.

    Raises:
        ConfigError: What was asked for is none.
    """
    share = cache.memory_share
    if not 0 < share <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization {share:g} is no share of memory: give more than 0, at most 1.",
            param="gpu_memory_utilization",
        )
    return share


def asked_blocks(cache: CacheConfig, block_bytes: int) -> int | None:
    """KV blocks that were asked for, by number or by bytes; None: nobody did.

    Raises:
        ConfigError, MemoryBudgetError: That is not one.
    """
    if (blocks := cache.num_gpu_blocks_override) is not None:
        if blocks < 1:
            raise ConfigError("--num-gpu-blocks-override must be at least 1.", param="num_gpu_blocks_override")
        return blocks
    if (given := cache.kv_cache_memory_bytes) is None:
        return None
    if given < block_bytes:
        raise MemoryBudgetError(f"--kv-cache-memory-bytes {given} holds no block of {block_bytes} bytes: raise it.")
    return given // block_bytes


def reaches_of(spec: ModelSpec) -> tuple[GroupReach, ...]:
    """How far back each of a model's KV groups looks."""
    return tuple(GroupReach(group.window) for group in spec.kv_groups())


def most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits, or 0."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def size(count: int) -> str:
    """Bytes as people read them."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    return f"{count / 2**20:,.1f} MiB"
