"""How memory is divided: how many KV blocks there are, how long a sequence may be, how much may be swapped.

`plan_kv_cache` is the only place that decides this. The start calls it with a `Machine` before anything is loaded, when
a GPU's plan is an estimate. A worker calls it again with a `MeasuredMemory` once its model is loaded and its largest
step has run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.errors import ConfigError, MemoryBudgetError
from quire.foundation.config import Config
from quire.models.spec import ModelSpec
from quire.planning.footprint import GIB, Footprint, format_bytes
from quire.planning.machine import Machine
from quire.planning.memory_budget import (
    SWAP_SHARE,
    TIER_SHARE,
    CpuBudget,
    GpuBudget,
    KVDemand,
    MemoryBudget,
    activation_bytes,
    block_bytes,
    requested_blocks,
    usable_blocks,
    weight_bytes,
)
from quire.planning.speech import sources_bytes
from quire.planning.state_memory import num_states, smallest_number_of_states, states_bytes
from quire.planning.step_limits import StepLimits, is_auto, length_limit
from quire.scheduling.kvcache.cache_groups import largest_fitting


class NumBlocks(NamedTuple):
    """Numbers of KV blocks: of the device without the dummy, and of the host for preempted sequences; and of states
    without the dummy, in models that have any."""

    device: int
    host: int
    states: int = 0

    def smaller(self, other: NumBlocks) -> NumBlocks:
        """The smaller number of each kind."""
        states = smallest_number_of_states((self.states, other.states))
        return NumBlocks(min(self.device, other.device), min(self.host, other.host), states)


@dataclass(frozen=True)
class MeasuredMemory:
    """What a worker knows once its model is loaded: the bytes of the GPU that are left for the KV cache, and whether
    our own kernels compute. `bytes_left` is None on a CPU, where nothing is measured: the settings, resolved from an
    earlier plan, give the number of blocks."""

    bytes_left: int | None = None
    own_kernels: bool = True


@dataclass(frozen=True)
class KVCachePlan:
    """How memory is divided: KV blocks without the dummy, and the division in bytes, with weights and activations. If
    it `is_estimate`, the worker will measure, and then say how many blocks there are. `num_states` counts states of
    sequences and checkpoints without the dummy; 0 in models without states."""

    max_model_len: int
    num_blocks: int
    num_host_blocks: int
    footprint: Footprint
    reason: str
    is_estimate: bool = False
    num_states: int = 0

    @property
    def blocks(self) -> NumBlocks:
        """KV blocks on the device and on the host, and states."""
        return NumBlocks(self.num_blocks, self.num_host_blocks, self.num_states)


def plan_kv_cache(config: Config, spec: ModelSpec, memory: Machine | MeasuredMemory) -> KVCachePlan:
    """Divide the memory of the device that the settings name.

    The KV cache gets what was requested, or else what weights and activations leave of the engine's share. A length of
    `auto` becomes the longest that fits.

    Args:
        config: Device, dtype and batch are resolved; with a `MeasuredMemory`, everything is.
        spec: A rank's share of the model, if several ranks divide it.
        memory: A machine before the start, or what was measured after loading.

    Raises:
        ConfigError: A setting makes no sense.
        MemoryBudgetError: The weights, or one sequence of the requested length, do not fit; the message names the flags
            to change.
    """
    if isinstance(memory, MeasuredMemory):
        return _measured_plan(config, spec, memory)
    demand = KVDemand.of(config, spec)
    gpu = memory.gpu if config.device.device == "cuda" else None
    budget: MemoryBudget = CpuBudget(config, spec, demand, memory)
    if gpu is not None:
        budget = GpuBudget(config, spec, demand, gpu, memory.memory_bytes)
    states = num_states(config, spec, demand.limits, budget.left_for_caches(demand.limits.length))
    budget.set_aside(states_bytes(config, spec, demand.limits, states))
    requested = 1 if not demand.groups else requested_blocks(config.cache, demand.block_bytes)
    length = _max_model_len(config, spec, demand, budget, requested)
    num_blocks, reason = (requested, "as asked") if requested else budget.num_kv_blocks(length)
    footprint = budget.footprint(length, num_blocks)
    num_host_blocks = _num_host_blocks(config, demand, budget, footprint, length)
    footprint = replace(footprint, swap_space=num_host_blocks * demand.block_bytes)
    is_estimate = gpu is not None and requested is None
    if not demand.groups:
        reason = "no layer caches tokens"
    return KVCachePlan(length, num_blocks, num_host_blocks, footprint, reason, is_estimate, states)


def check_host_tier(config: Config, spec: ModelSpec) -> None:
    """Raise a ConfigError if the prefix cache can keep nothing in host memory."""
    size, why = config.cache.kv_offloading_size, ""
    _check_disk(config, spec)
    if size is None:
        return
    if not 0 < size < math.inf:
        why = f"must be above 0, and finite; got {size:g}"
    elif not spec.kv_groups():
        why = "is of no use: no layer of this model caches tokens"
    elif spec.keeps_own_cache or spec.two_sided:
        why = "is of no use: this model's sequences share no blocks"
    elif not config.cache.enable_prefix_caching:
        why = "needs the prefix cache: leave out --no-enable-prefix-caching"
    if why:
        raise ConfigError(f"--kv-offloading-size {why}.", param="kv_offloading_size")


def _check_disk(config: Config, spec: ModelSpec) -> None:
    """Raise a ConfigError if the prefix cache can keep nothing on disk."""
    cache, why = config.cache, ""
    if cache.kv_disk_path is None:
        return
    if not 0 < cache.kv_disk_size < math.inf:
        raise ConfigError(
            f"--kv-disk-size must be above 0, and finite; got {cache.kv_disk_size:g}.", param="kv_disk_size"
        )
    if cache.kv_offloading_size is None:
        why = "needs --kv-offloading-size: blocks come and go through host memory"
    elif spec.state_layers:
        why = "is of no use: this model's states stay on the device, and without them its blocks serve nobody"
    elif config.parallel.ranks > 1 or config.parallel.data_parallel_size > 1:
        why = "serves one engine of one rank: leave it out, or leave out --tensor-parallel-size and the like"
    if why:
        raise ConfigError(f"--kv-disk-path {why}.", param="kv_disk_path")


def _num_host_blocks(config: Config, demand: KVDemand, budget: MemoryBudget, footprint: Footprint, length: int) -> int:
    """Blocks that the host has room for, and that are of use: without the prefix cache's tier, those of sequences."""
    if not demand.groups:
        return 0
    is_tier = config.cache.kv_offloading_size is not None
    most = budget.swap_limit(footprint, TIER_SHARE if is_tier else SWAP_SHARE)
    blocks = max(0, min(config.cache.host_bytes(config.parallel.ranks), most)) // demand.block_bytes
    return blocks if is_tier else min(blocks, demand.blocks_for_all_sequences(length))


def _max_model_len(
    config: Config, spec: ModelSpec, demand: KVDemand, budget: MemoryBudget, requested: int | None
) -> int:
    """The length that was asked for, the model's, or for `auto` the longest that fits by default. Raises
    MemoryBudgetError if not even one sequence of it fits."""

    def fits(length: int) -> bool:
        return demand.blocks_for_one_sequence(length) <= (requested or budget.max_blocks(length))

    def fits_by_default(length: int) -> bool:
        return demand.blocks_for_one_sequence(length) <= (requested or budget.default_blocks(length))

    length = length_limit(config, spec)
    if is_auto(config):
        length = max(2, largest_fitting(fits_by_default, length))
    if fits(length):
        return length
    needs, longest, auto = _needed(demand, length), largest_fitting(fits, length), ""
    if longest > 1:
        auto = f"--max-model-len {longest}, the longest that fits, or --max-model-len auto (here {longest:,} tokens)"
    if requested:
        raise MemoryBudgetError(f"{needs}, more than {_asked(config)}: raise it, or give {auto or 'a smaller model'}.")
    raise MemoryBudgetError(f"{needs}; {budget.shortage(length, auto)}")


def _needed(demand: KVDemand, length: int) -> str:
    blocks = demand.blocks_for_one_sequence(length)
    return (
        f"To serve at least one request with the model's max seq len ({length:,} tokens), "
        f"{format_bytes(blocks * demand.block_bytes)} of KV cache ({blocks:,} blocks) is needed"
    )


def _asked(config: Config) -> str:
    """The setting that says how large the KV cache is."""
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        return f"--num-gpu-blocks-override {cache.num_gpu_blocks_override}"
    return f"--kv-cache-memory-bytes {cache.kv_cache_memory_bytes}"


def _measured_plan(config: Config, spec: ModelSpec, memory: MeasuredMemory) -> KVCachePlan:
    """The plan of resolved settings, whose KV cache gets what is left and of use where no number of blocks is given.
    Raises MemoryBudgetError if that is not enough for the longest sequence."""
    limits, size = StepLimits.of(config), block_bytes(config, spec)
    requested = 1 if not spec.kv_groups() else requested_blocks(config.cache, size)
    reason, num_blocks, bytes_left = "as asked", requested, memory.bytes_left
    states = num_states(config, spec, limits, bytes_left)
    of_states = states_bytes(config, spec, limits, states)
    if num_blocks is None:
        assert bytes_left is not None, "the size of the KV cache has not been chosen"
        bytes_left -= of_states
        reason, num_blocks = "measured", usable_blocks(bytes_left, size)
        if num_blocks < 1:
            raise MemoryBudgetError(
                f"Weights and activations leave {max(0, bytes_left) / GIB:.2f} GiB of the GPU for the KV cache: raise "
                "--gpu-memory-utilization, lower --max-num-batched-tokens or --max-num-seqs, or free memory."
            )
        demand = KVDemand.of(config, spec)
        _check_measured(demand, limits.length, num_blocks)
        num_blocks = demand.useful_blocks(num_blocks, limits.length)
    activations = activation_bytes(config, spec, limits, memory.own_kernels)
    num_host_blocks = config.cache.host_bytes(config.parallel.ranks) // size
    cached, swapped = (num_blocks + 1) * size, num_host_blocks * size
    of_sources = sources_bytes(config, spec)
    footprint = Footprint(weight_bytes(config, spec), activations, cached, swapped, of_states, of_sources)
    return KVCachePlan(limits.length, num_blocks, num_host_blocks, footprint, reason, num_states=states)


def _check_measured(demand: KVDemand, length: int, num_blocks: int) -> None:
    """Refuse a cache that turned out smaller than estimated, if the longest sequence does not fit."""
    if demand.blocks_for_one_sequence(length) <= num_blocks:
        return
    longest = largest_fitting(lambda each: demand.blocks_for_one_sequence(each) <= num_blocks, length)
    raise MemoryBudgetError(
        f"{_needed(demand, length)}, and weights and activations leave {num_blocks:,} blocks of the GPU: give "
        f"--max-model-len {longest}, raise --gpu-memory-utilization, or lower --max-num-batched-tokens or "
        "--max-num-seqs."
    )
