"""Whether another model fits beside the one that is served, and the settings that it gets. Starts nothing.

Beside means a share of memory until the old model is gone, and the KV cache keeps the size that it starts with. So a
swap is made beside where that leaves the new model at least half of the KV cache that it would have alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from quire.errors import MemoryBudgetError
from quire.foundation.config import Config
from quire.foundation.processes.launch import SwapMode
from quire.planning.auto_config import ResolvedConfig, resolve
from quire.planning.machine import Machine, this_machine
from quire.planning.memory_budget import memory_share

LEAST_SHARE = 0.5
"""To be loaded beside the old model, the new one must get this share of the KV cache that it would have alone."""


@dataclass(frozen=True)
class SwapPlan:
    """How a model takes another one's place, with the new model's settings and the reason for the mode."""

    mode: SwapMode
    resolved: ResolvedConfig
    reason: str


def plan_swap(
    served: Config, asked: Config, mode: Literal["auto", "beside", "after"], machine: Machine | None = None
) -> SwapPlan:
    """Choose where it was left open, and resolve the new model's settings for the memory that it will find.

    `served` are the resolved settings of the model whose engines run; the machine is this one by default. Raises
    SetupError if the new model cannot be served at all, or not in this mode.
    """
    machine = machine or this_machine()
    if mode == "after":
        return SwapPlan("after", resolve(asked, _without(machine, served), replicas=True), "as asked")
    try:
        beside = resolve(asked, _beside(machine, served), replicas=True)
    except MemoryBudgetError as error:
        if mode == "beside":
            raise MemoryBudgetError(
                f"It does not fit beside the model that is served; mode 'after' ends that one first. {error.message}",
                param="mode",
            ) from error
        alone = resolve(asked, _without(machine, served), replicas=True)
        return SwapPlan("after", alone, "both models do not fit into memory together")
    if mode == "beside":
        return SwapPlan("beside", beside, "as asked")
    alone = resolve(asked, _without(machine, served), replicas=True)
    if beside.memory.num_blocks < LEAST_SHARE * alone.memory.num_blocks:
        share = beside.memory.num_blocks / alone.memory.num_blocks
        return SwapPlan("after", alone, f"beside the old model it would have {share:.0%} of the KV cache")
    return SwapPlan("beside", beside, "both models fit into memory together")


def _beside(machine: Machine, served: Config) -> Machine:
    """The machine as a new model finds it while the old one serves: on a CPU, less what that one may still take. Pages
    are taken as they are written, so its KV cache counts as if nothing of it were."""
    if served.device.device == "cuda":
        return machine  # its memory is taken as a whole at the start
    _, later = _memory_of(served, machine)
    return replace(machine, memory_bytes=max(0, machine.memory_bytes - later))


def _without(machine: Machine, served: Config) -> Machine:
    """The machine as a new model finds it when the old one is gone, at least."""
    if served.device.device == "cuda":
        gpu = machine.gpu
        if gpu is None:
            return machine
        freed = int(memory_share(served.cache) * gpu.memory_bytes)
        return replace(machine, gpu=replace(gpu, free_bytes=min(gpu.memory_bytes, gpu.free_bytes + freed)))
    weights, _ = _memory_of(served, machine)
    return replace(machine, memory_bytes=machine.memory_bytes + weights)


def _memory_of(served: Config, machine: Machine) -> tuple[int, int]:
    """Bytes that the served model takes on a CPU: weights, which are there, and the rest, which may not be yet."""
    processes = served.parallel.ranks * served.parallel.data_parallel_size
    footprint = resolve(served, machine, replicas=True).memory.footprint
    later = footprint.activations + footprint.kv_cache + footprint.swap_space
    return footprint.weights * processes, later * processes
