"""How many KV blocks fit into the memory that the engine may take, estimated before anything is loaded.

On a CPU, activations grow with the longest sequence, because of its block tables; on a GPU, they are estimated for the
longest length that the settings allow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.errors import ConfigError
from quire.foundation.config import CacheConfig, Config
from quire.foundation.config.cache import UTILIZATION
from quire.models.spec import ModelSpec
from quire.planning.adapter_memory import adapter_bytes
from quire.planning.byte_sizes import format_bytes
from quire.planning.context_length import length_limit
from quire.planning.draft_model import draft_bytes
from quire.planning.footprint import Footprint, cpu_activation_bytes, gpu_activation_bytes
from quire.planning.kv_demand import KVDemand
from quire.planning.machine import Gpu, Machine
from quire.planning.step_limits import StepLimits

DEFAULT_CACHE_SHARE = 0.5
"""The share of the memory left by weights and activations that a CPU's KV cache takes when no utilization is given.

Pages that were written once stay taken, and a machine that swaps is slower than an engine that preempts.
"""
ESTIMATED_SHARE = 0.95
"""The share of the KV blocks estimated to fit a GPU that the length of `auto` relies on."""
SWAP_SHARE = 0.5
"""The largest share that swap space takes: of what the engine leaves on a CPU, or of free host memory with a GPU."""


class MemoryBudget(Protocol):
    """The memory that an engine may take on one device; `length` is that of the longest sequence."""

    def max_blocks(self, length: int) -> int:
        """KV blocks that fit, the dummy not counted."""

    def default_blocks(self, length: int) -> int:
        """KV blocks that the engine takes of its own accord: fewer than fit where memory is shared with others."""

    def num_kv_blocks(self, length: int) -> tuple[int, str]:
        """KV blocks where no number was requested and one sequence fits, and the reason."""

    def footprint(self, length: int, blocks: int) -> Footprint:
        """Bytes with that many blocks, without swap space."""

    def swap_limit(self, footprint: Footprint) -> int:
        """Bytes of host memory that swap space may take beside the footprint."""

    def shortage(self, length: int, auto: str) -> str:
        """Why a sequence does not fit and what to do. `auto` names the flag that finds a length, if any fits."""


class CpuBudget:
    """A share of the main memory that is available.

    Args:
        machine: For its main memory that nobody has taken, and its kernels.
    """

    def __init__(self, config: Config, spec: ModelSpec, demand: KVDemand, machine: Machine) -> None:
        available = machine.memory_bytes
        self._config, self._spec, self._demand, self._available = config, spec, demand, available
        self._draft_weights = draft_bytes(config).weights
        self._own_kernels = machine.own_kernels
        self._share = memory_share(config.cache)
        self._bytes = self._share * available

    def max_blocks(self, length: int) -> int:
        return self._blocks_in(self._bytes, length)

    def default_blocks(self, length: int) -> int:
        """Return the KV blocks that fit into the given utilization; without one, into half of what the rest leaves."""
        if self._config.cache.gpu_memory_utilization is not None:
            return self.max_blocks(length)
        rest = self.footprint(length, 0).total
        return self._blocks_in(rest + DEFAULT_CACHE_SHARE * (self._bytes - rest), length)

    def num_kv_blocks(self, length: int) -> tuple[int, str]:
        """No more than all sequences can use, and always enough for one."""
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
        demand, dtype = self._demand, self._config.model.dtype
        limits = StepLimits(demand.rows, demand.chunk, length)
        activations = cpu_activation_bytes(self._spec, dtype, demand.block_size, limits, self._own_kernels)
        weights = self._spec.weight_bytes(dtype) + self._draft_weights + adapter_bytes(self._config, self._spec)
        return Footprint(weights, activations, (blocks + 1) * demand.block_bytes)

    def swap_limit(self, footprint: Footprint) -> int:
        """A share of what the engine leaves of its share."""
        return int(SWAP_SHARE * max(0, int(self._bytes) - footprint.total))

    def shortage(self, length: int, auto: str) -> str:
        without = self.footprint(length, 0)
        left = max(0, int(self._bytes) - without.total)
        return (
            f"of {self._share:.0%} of {format_bytes(self._available)} available, weights take "
            f"{format_bytes(without.weights)}{_of_adapters(adapter_bytes(self._config, self._spec))} and activations "
            f"{format_bytes(without.activations)}, so {format_bytes(left)} are left: "
            f"give {auto or 'a smaller model'}, raise --gpu-memory-utilization, or free memory."
        )

    def _blocks_in(self, size: float, length: int) -> int:
        """The most blocks with which everything takes at most `size` bytes."""
        limit = max(0, int(size)) // self._demand.block_bytes
        return largest_fitting(lambda blocks: self.footprint(length, blocks).total <= size, limit)


class GpuBudget:
    """A share of a GPU's memory, less what others have taken of it. An estimate: the worker measures.

    Args:
        host_bytes: Bytes of free main memory, for the swap space.
    """

    def __init__(self, config: Config, spec: ModelSpec, demand: KVDemand, gpu: Gpu, host_bytes: int) -> None:
        self._demand, self._gpu, self._host_bytes = demand, gpu, host_bytes
        self._share = memory_share(config.cache)
        dtype = config.model.dtype
        speculation = config.speculation.speculation
        drafts = 0 if speculation is None else speculation.tokens
        limits = StepLimits(demand.rows, demand.chunk, length_limit(config, spec), drafts)
        self._adapters = adapter_bytes(config, spec)
        self._weights = spec.weight_bytes(dtype) + self._adapters
        self._activations = gpu_activation_bytes(spec, dtype, demand.block_size, limits)
        self._weights += draft_bytes(config).weights
        self._others = gpu.memory_bytes - gpu.free_bytes
        self._left = int(self._share * gpu.memory_bytes) - self._others - self._weights - self._activations

    def max_blocks(self, length: int) -> int:
        """Return how many KV blocks fit, the dummy not counted; on a GPU, `length` does not matter."""
        return usable_blocks(self._left, self._demand.block_bytes)

    def default_blocks(self, length: int) -> int:
        """Return most of the KV blocks that fit, since a length chosen by this estimate must fit what is measured."""
        return int(ESTIMATED_SHARE * self.max_blocks(length))

    def num_kv_blocks(self, length: int) -> tuple[int, str]:
        """Return the number of KV blocks that fit, and the reason."""
        return self.max_blocks(length), f"what {self._share:.0%} of the GPU leaves, measured at the start"

    def footprint(self, length: int, blocks: int) -> Footprint:
        return Footprint(self._weights, self._activations, (blocks + 1) * self._demand.block_bytes)

    def swap_limit(self, footprint: Footprint) -> int:
        """Return the most bytes of swap space: a share of the host's free memory."""
        return int(SWAP_SHARE * self._host_bytes)

    def shortage(self, length: int, auto: str) -> str:
        return (
            f"of {self._share:.0%} of {self._gpu.name}'s {format_bytes(self._gpu.memory_bytes)}, others have "
            f"{format_bytes(self._others)}, weights take {format_bytes(self._weights)}{_of_adapters(self._adapters)} "
            f"and activations about {format_bytes(self._activations)}, so {format_bytes(max(0, self._left))} are left: "
            f"{f'give {auto}, ' if auto else ''}raise --gpu-memory-utilization, or give a smaller model."
        )


def _of_adapters(size: int) -> str:
    """How much of what weights take is of adapters, in words; empty if none are served."""
    return f" ({format_bytes(size)} of it for adapters, by --max-loras and --max-lora-rank)" if size else ""


def memory_share(cache: CacheConfig) -> float:
    """The share of memory that the engine may take.

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


def usable_blocks(size: int, block_bytes: int) -> int:
    """KV blocks in `size` bytes beside the dummy."""
    return max(0, size // block_bytes - 1)


def largest_fitting(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits, or 0, by bisection."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
