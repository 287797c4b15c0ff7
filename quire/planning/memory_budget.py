"""How many KV blocks sequences need, and how many fit into the memory that the engine may take.

What fits is estimated before anything is loaded. On a CPU, activations grow with the longest sequence, because of its
block tables; on a GPU, they are estimated for the longest length that the settings allow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.errors import ConfigError, MemoryBudgetError
from quire.foundation.config import CacheConfig, Config
from quire.foundation.config.cache import UTILIZATION
from quire.models.spec import ModelSpec
from quire.planning.draft_model import draft_bytes
from quire.planning.fallback import sequence_bytes
from quire.planning.footprint import Footprint, adapter_bytes, cpu_activation_bytes, format_bytes, gpu_activation_bytes
from quire.planning.images import tower_bytes
from quire.planning.machine import Gpu, Machine
from quire.planning.speech import encoder_bytes, sources_bytes
from quire.planning.step_limits import StepLimits, length_limit
from quire.scheduling.kvcache.cache_groups import CacheGroup, blocks_per_sequence, largest_fitting, max_cached_tokens

DEFAULT_CACHE_SHARE = 0.5
"""The share of the memory left by weights and activations that a CPU's KV cache takes when no utilization is given:
pages that were written once stay taken, and a machine that swaps is slower than an engine that preempts."""
ESTIMATED_SHARE = 0.95
"""The share of the KV blocks estimated to fit a GPU that the length of `auto` relies on."""
SWAP_SHARE = 0.5
"""The largest share that swap space takes: of what the engine leaves on a CPU, or of free host memory with a GPU."""
TIER_SHARE = 0.9
"""The largest share of the same that the prefix cache's tier takes, whose size somebody has asked for."""


STEPS_WITH_BLOCKS = 3
"""Steps whose texts hold blocks at once, where each text is computed in one step: one is planned, one is computed, and
one is read."""


@dataclass(frozen=True)
class KVDemand:
    """KV blocks that sequences need, within the `limits` of a step, whose length is the longest that the settings
    allow. A block has `block_bytes`, with those of a draft model's block. With `whole_texts`, a sequence holds blocks
    for one step only."""

    groups: tuple[CacheGroup, ...]
    limits: StepLimits
    block_size: int
    block_bytes: int
    whole_texts: bool = False

    @classmethod
    def of(cls, config: Config, spec: ModelSpec) -> KVDemand:
        """The blocks that sequences need under settings whose dtype and batch are resolved."""
        limits = StepLimits.of(config, length_limit(config, spec))
        return cls(spec.kv_groups(), limits, config.cache.block_size, block_bytes(config, spec), spec.two_sided)

    def blocks_for_one_sequence(self, length: int) -> int:
        return blocks_per_sequence(self.groups, length, self.limits.tokens, self.block_size)

    def blocks_for_all_sequences(self, length: int) -> int:
        """Blocks of as many sequences of up to `length` tokens as may run at once."""
        blocks = self.limits.rows * self.blocks_for_one_sequence(length)
        if not self.whole_texts:
            return blocks
        of_step = -(-self.limits.tokens // self.block_size) + self.limits.rows  # each row's last one may not be full
        return min(blocks, STEPS_WITH_BLOCKS * len(self.groups) * of_step)

    def useful_blocks(self, num_blocks: int, length: int) -> int:
        """As many of the blocks as sequences can hold where they hold them for one step only; otherwise all of them,
        since what is cached of earlier prompts takes any number."""
        return min(num_blocks, self.blocks_for_all_sequences(length)) if self.whole_texts else num_blocks

    def cached_tokens(self, num_blocks: int, length: int) -> int:
        """Tokens that so many blocks hold, in sequences of `length` tokens."""
        return max_cached_tokens(self.groups, num_blocks, self.block_size, self.limits.tokens, length)


def block_bytes(config: Config, spec: ModelSpec) -> int:
    """Bytes of a KV block, with those of the draft model's block beside it; 1 where no layer caches tokens."""
    return max(1, spec.kv_block_bytes(config.kv_dtype, config.cache.block_size) + draft_bytes(config).block)


def requested_blocks(cache: CacheConfig, block_bytes: int) -> int | None:
    """KV blocks that the settings ask for, by number or by bytes; None if they do not. Raises ConfigError or
    MemoryBudgetError if that is not one block."""
    if (blocks := cache.num_gpu_blocks_override) is not None:
        if blocks < 1:
            raise ConfigError("--num-gpu-blocks-override must be at least 1.", param="num_gpu_blocks_override")
        return blocks
    if (requested := cache.kv_cache_memory_bytes) is None:
        return None
    if requested < block_bytes:
        raise MemoryBudgetError(f"--kv-cache-memory-bytes {requested} holds no block of {block_bytes} bytes: raise it.")
    return requested // block_bytes


class CpuBudget:
    """A share of the main memory that is available. Every `length` is that of the longest sequence."""

    def __init__(self, config: Config, spec: ModelSpec, demand: KVDemand, machine: Machine) -> None:
        self._config, self._spec, self._demand, self._machine = config, spec, demand, machine
        self._weights, self._share = weight_bytes(config, spec), memory_share(config.cache)
        self._available = machine.memory_bytes
        self._bytes = self._share * self._available
        self._states = 0
        self._sources = sources_bytes(config, spec)

    def left_for_caches(self, length: int) -> int:
        """Bytes that states and KV blocks share: without a given utilization, half of what is left."""
        left = int(self._bytes) - self.footprint(length, 0).total
        return left if self._config.cache.gpu_memory_utilization is not None else int(DEFAULT_CACHE_SHARE * left)

    def set_aside(self, states: int) -> None:
        """Leave so many bytes to states."""
        self._states = states

    def max_blocks(self, length: int) -> int:
        """KV blocks that fit, the dummy not counted."""
        return self._blocks_in(self._bytes, length)

    def default_blocks(self, length: int) -> int:
        """KV blocks that fit into the given utilization; without one, into half of what the rest leaves."""
        if self._config.cache.gpu_memory_utilization is not None:
            return self.max_blocks(length)
        rest = self.footprint(length, 0).total
        return self._blocks_in(rest + DEFAULT_CACHE_SHARE * (self._bytes - rest), length)

    def num_kv_blocks(self, length: int) -> tuple[int, str]:
        """KV blocks where no number was requested, and the reason: enough for one sequence, no more than for all."""
        of_one, of_all = self._demand.blocks_for_one_sequence(length), self._demand.blocks_for_all_sequences(length)
        blocks = min(of_all, max(self.default_blocks(length), of_one))
        share = f"{self._share:.0%} of the memory available, less weights and activations"
        if blocks == of_all:
            return blocks, "all sequences at full length"
        if self._config.cache.gpu_memory_utilization is not None:
            return blocks, share
        if blocks == of_one:
            return blocks, "one sequence at full length"
        all_of_it = f"--gpu-memory-utilization {UTILIZATION} for it"
        return blocks, f"{DEFAULT_CACHE_SHARE:.0%} of {share}, so that nothing swaps; {all_of_it}"

    def footprint(self, length: int, blocks: int) -> Footprint:
        """Bytes with that many blocks, without swap space."""
        limits = replace(self._demand.limits, length=length)
        activations = activation_bytes(self._config, self._spec, limits, self._machine.own_kernels)
        cached = (blocks + 1) * self._demand.block_bytes
        return Footprint(self._weights, activations, cached, states=self._states, sources=self._sources)

    def swap_limit(self, footprint: Footprint, share: float) -> int:
        """Bytes that host blocks may take: a share of what the footprint leaves of the engine's share."""
        return int(share * max(0, int(self._bytes) - footprint.total))

    def shortage(self, length: int, auto: str) -> str:
        """Why a sequence does not fit and what to do. `auto` names the flag that finds a length, if any fits."""
        without = self.footprint(length, 0)
        left = max(0, int(self._bytes) - without.total)
        return (
            f"of {self._share:.0%} of {format_bytes(self._available)} available, weights take "
            f"{format_bytes(without.weights)}{_of_adapters(self._config, self._spec)} and activations "
            f"{format_bytes(without.activations)}, so {format_bytes(left)} are left: "
            f"give {auto or 'a smaller model'}, raise --gpu-memory-utilization, or free memory."
        )

    def _blocks_in(self, size: float, length: int) -> int:
        """The most blocks with which everything takes at most `size` bytes."""
        limit = max(0, int(size)) // self._demand.block_bytes
        return largest_fitting(lambda blocks: self.footprint(length, blocks).total <= size, limit)


class GpuBudget:
    """A share of a GPU's memory, less what others have taken of it; methods are those of CpuBudget. An estimate, since
    the worker measures. `host_bytes` of free main memory are for the swap space."""

    def __init__(self, config: Config, spec: ModelSpec, demand: KVDemand, gpu: Gpu, host_bytes: int) -> None:
        self._demand, self._gpu, self._host_bytes = demand, gpu, host_bytes
        self._weights, self._share = weight_bytes(config, spec), memory_share(config.cache)
        self._of_adapters = _of_adapters(config, spec)
        self._activations = activation_bytes(config, spec, demand.limits)
        self._others = gpu.memory_bytes - gpu.free_bytes
        self._left = int(self._share * gpu.memory_bytes) - self._others - self._weights - self._activations
        self._states = 0

    def left_for_caches(self, length: int) -> int:
        """Bytes that states and KV blocks share; on a GPU, `length` does not matter."""
        return self._left

    def set_aside(self, states: int) -> None:
        """Leave so many bytes to states."""
        self._states = states
        self._left -= states

    def max_blocks(self, length: int) -> int:
        """KV blocks that fit, the dummy not counted; on a GPU, `length` does not matter."""
        return usable_blocks(self._left, self._demand.block_bytes)

    def default_blocks(self, length: int) -> int:
        """Most of the KV blocks that fit, since a length chosen by this estimate must fit what is measured."""
        return int(ESTIMATED_SHARE * self.max_blocks(length))

    def num_kv_blocks(self, length: int) -> tuple[int, str]:
        most = self.max_blocks(length)
        useful = self._demand.useful_blocks(most, length)
        if useful < most:
            return useful, "all texts of the steps in flight"
        return most, f"what {self._share:.0%} of the GPU leaves, measured at the start"

    def footprint(self, length: int, blocks: int) -> Footprint:
        cached = (blocks + 1) * self._demand.block_bytes
        return Footprint(self._weights, self._activations, cached, states=self._states)

    def swap_limit(self, footprint: Footprint, share: float) -> int:
        """Bytes that host blocks may take: a share of the host's free memory."""
        return int(share * self._host_bytes)

    def shortage(self, length: int, auto: str) -> str:
        return (
            f"of {self._share:.0%} of {self._gpu.name}'s {format_bytes(self._gpu.memory_bytes)}, others have "
            f"{format_bytes(self._others)}, weights take {format_bytes(self._weights)}{self._of_adapters} "
            f"and activations about {format_bytes(self._activations)}, so {format_bytes(max(0, self._left))} are left: "
            f"{f'give {auto}, ' if auto else ''}raise --gpu-memory-utilization, or give a smaller model."
        )


MemoryBudget = CpuBudget | GpuBudget
"""The memory that an engine may take on one device."""


def _of_adapters(config: Config, spec: ModelSpec) -> str:
    """How much of the weights' bytes adapters take, in words; empty without adapters."""
    size = adapter_bytes(config, spec)
    return f" ({format_bytes(size)} of it for adapters, by --max-loras and --max-lora-rank)" if size else ""


def weight_bytes(config: Config, spec: ModelSpec) -> int:
    """Bytes of the model's weights, with the draft model's and the adapters'."""
    return (
        spec.weight_bytes(config.model.dtype)
        + tower_bytes(config, spec)
        + encoder_bytes(config, spec)
        + draft_bytes(config).weights
        + adapter_bytes(config, spec)
    )


def activation_bytes(config: Config, spec: ModelSpec, limits: StepLimits, own_kernels: bool = True) -> int:
    """Bytes that the largest step holds on the device that the settings name."""
    dtype, block_size = config.model.dtype, config.cache.block_size
    own = sequence_bytes(config, spec)
    if config.device.device == "cuda":
        return own + gpu_activation_bytes(spec, dtype, block_size, limits) + draft_bytes(config).activations
    return own + cpu_activation_bytes(spec, dtype, block_size, limits, own_kernels)


def memory_share(cache: CacheConfig) -> float:
    """The share of memory that the engine may take. Raises ConfigError if the one that was asked for makes no sense."""
    share = cache.memory_share
    if not 0 < share <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization {share:g} is no share of memory: give more than 0, at most 1.",
            param="gpu_memory_utilization",
        )
    return share


def usable_blocks(size: int, block_bytes: int) -> int:
    """KV blocks in `size` bytes beside the dummy."""
    return max(0, size // block_bytes - 1)
