"""Puts a scheduler together from settings, the model's spec and what the device said. Decides nothing at run time."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from quire.clock import Clock
from quire.config import Config
from quire.costmodel.hardware import cpu, gpu
from quire.costmodel.roofline import Roofline
from quire.kvcache.groups import FULL, GroupReach, capacity, tokens_held
from quire.kvcache.host import HostPool
from quire.kvcache.keys import KeysByLength
from quire.kvcache.pool import BlockPool
from quire.logits_processors import load_processors, takes
from quire.messages import Add, Ready, Sizing
from quire.models.spec import ModelSpec
from quire.planning.machine import this_machine
from quire.planning.memory_plan import reaches_of
from quire.sampling import SamplingParams
from quire.scheduler.budget import Budget
from quire.scheduler.preempt import Preemption
from quire.scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Traits:
    """What the scheduler has to know of a model on a device.

    Attributes:
        groups: How far back each KV group looks.
        cost: What steps and preemptions cost; None: only tokens count.
        keys: How keys depend on their sequence's length, if they do.
        drafts: How many tokens the device guesses ahead for a request, at most; None: it guesses none.
    """

    groups: Sequence[GroupReach] = FULL
    cost: Roofline | None = None
    keys: KeysByLength | None = None
    drafts: Callable[[SamplingParams], int] | None = None


def traits_of(config: Config, spec: ModelSpec) -> Traits:
    """The traits of a model under resolved settings, on this machine's device."""
    machine_gpu = this_machine().gpu if config.device.device == "cuda" else None
    hardware = cpu(len(os.sched_getaffinity(0))) if machine_gpu is None else gpu(machine_gpu.name)
    hardware = hardware.at(config.model.dtype)
    return Traits(reaches_of(spec), Roofline(spec, config.model.dtype, hardware, config.cache.block_size), spec.keys)


def ready_of(config: Config, sizing: Sizing, traits: Traits) -> Ready:
    """What clients are told. A GPU's KV cache may turn out smaller than it was estimated: that is logged."""
    tokens, longest = config.scheduler.max_num_batched_tokens, config.model.max_model_len
    assert tokens and isinstance(longest, int), "settings are resolved by quire.planning.auto_config"
    block_size = config.cache.block_size
    held = capacity(traits.groups, sizing.num_blocks, block_size, tokens, longest)
    if held < longest and config.cache.num_gpu_blocks_override is None:
        _log.warning(
            "context     the KV cache holds %d tokens of one sequence, and not %d: longer requests are refused. Raise "
            "--gpu-memory-utilization, or lower --max-num-batched-tokens or --max-num-seqs.", held, longest,
        )  # fmt: skip
    return Ready(
        model=config.model.model,
        max_model_len=longest,
        vocab_size=sizing.vocab_size,
        num_blocks=sizing.num_blocks,
        block_size=block_size,
        capacity=held,
        kv_tokens=tokens_held(traits.groups, sizing.num_blocks, block_size, tokens, longest),
        startup=sizing.startup,
    )


def scheduler_of(
    config: Config, sizing: Sizing, traits: Traits, clock: Clock, masked: Callable[[Add], bool] | None = None
) -> Scheduler:
    """The scheduler that the settings ask for; reads of the sequences that are `masked` wait for masks."""
    limits, cache = config.scheduler, config.cache
    assert limits.max_num_seqs and limits.max_num_batched_tokens, "settings are resolved by quire.planning.auto_config"
    processors = load_processors(config.model.logits_processors)
    return Scheduler(
        BlockPool(sizing.num_blocks, cache.block_size),
        limits.max_num_seqs,
        Budget(
            limits.max_num_batched_tokens,
            limits.long_prefill_token_threshold,
            traits.cost,
            sizing.step_sizes,
            limits.performance_mode or "balanced",
        ),
        Preemption(HostPool(sizing.num_host_blocks), limits.preemption_mode, traits.cost),
        clock,
        groups=traits.groups,
        policy=limits.scheduling_policy,
        prefix_caching=cache.enable_prefix_caching,
        keys=traits.keys,
        host_bound=partial(takes, processors) if processors else None,
        drafts=traits.drafts,
        masked=masked,
    )
