"""Builds the scheduler and the Ready message from settings, the model's spec and the device's limits."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from quire.compute.mesh import mesh_of
from quire.foundation.clock import Clock
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import NO_POOLING, PoolingInfo, Ready
from quire.foundation.messages.to_engine import Add
from quire.foundation.messages.workers import DeviceLimits
from quire.logits_processors import load_processors, takes
from quire.models.rank_spec import rank_share
from quire.models.spec import ModelSpec
from quire.planning.costmodel.hardware import cpu, gpu
from quire.planning.costmodel.roofline import Roofline
from quire.planning.images import kept_vectors
from quire.planning.machine import this_machine
from quire.planning.memory_budget import block_bytes
from quire.planning.step_limits import StepLimits
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.scheduling.kvcache.block_pool import BlockPool
from quire.scheduling.kvcache.cache_groups import FULL_ATTENTION, CacheGroup, capacity, max_cached_tokens
from quire.scheduling.kvcache.disk_pool import DiskPool
from quire.scheduling.kvcache.host_index import HostIndex
from quire.scheduling.kvcache.host_pool import HostPool
from quire.scheduling.kvcache.host_tier import HostTier
from quire.scheduling.kvcache.rope_length_mode import RopeLengthMode
from quire.scheduling.scheduler.encoder_cache import EncoderCache
from quire.scheduling.scheduler.preemption import Preemption
from quire.scheduling.scheduler.scheduler import Scheduler
from quire.scheduling.scheduler.sequence_states import CheckpointRule
from quire.scheduling.scheduler.token_budget import TokenBudget

_SAVED_AHEAD = 4
"""On a GPU, one of so many blocks, of those that are allocated next, is kept saved on the host."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelRuntimeInfo:
    """What the scheduler needs to know about a model on its device.

    Attributes:
        cost: What steps and preemptions cost; None if only tokens count.
        shares_blocks: Whether sequences may share what was computed of a common beginning.
        drafts: Maximum number of draft tokens of a request in a step; None for no speculation.
        pooling: What the model makes of whole texts.
        pools_from_cache: See Scheduler.
        whole_texts: See TokenBudget.
        kept_vectors: Most vectors of images that the worker keeps; 0: the model reads text alone.
        block_bytes: Bytes of a KV block in all ranks.
        hears: Whether each prompt has a source, which an encoder reads.
        host_index: What host blocks hold, whose memory outlives the engine; None: it does not.
    """

    groups: Sequence[CacheGroup] = FULL_ATTENTION
    cost: Roofline | None = None
    rope_length_mode: RopeLengthMode | None = None
    drafts: Callable[[SamplingParams], int] | None = None
    shares_blocks: bool = True
    pooling: PoolingInfo = NO_POOLING
    pools_from_cache: Callable[[PoolingParams], bool] | None = None
    whole_texts: bool = False
    kept_vectors: int = 0
    block_bytes: int = 0
    hears: bool = False
    host_index: HostIndex | None = None


def build_model_runtime_info(config: Config, spec: ModelSpec) -> ModelRuntimeInfo:
    """What the scheduler needs to know under resolved settings on this machine's device."""
    machine_gpu = this_machine().gpu if config.device.device == "cuda" else None
    hardware = cpu(len(os.sched_getaffinity(0))) if machine_gpu is None else gpu(machine_gpu.name)
    hardware = hardware.at(config.model.dtype)
    # Ranks on a CPU share its memory.
    share = spec if machine_gpu is None else rank_share(spec, mesh_of(config.parallel))
    speculation = config.speculation.speculation
    cost = Roofline(share, config.model.dtype, hardware, config.cache.block_size, config.kv_dtype)
    drafts = None if speculation is None else lambda sampling: speculation.tokens
    ranks = 1 if machine_gpu is None else config.parallel.ranks
    return replace(
        runtime_info_of(spec, cost),
        drafts=drafts,
        kept_vectors=kept_vectors(config, spec),
        block_bytes=ranks * block_bytes(config, share),
    )


def runtime_info_of(spec: ModelSpec, cost: Roofline | None) -> ModelRuntimeInfo:
    """What the scheduler needs to know about a model whose steps cost so much, without speculation."""
    return ModelRuntimeInfo(
        spec.kv_groups(),
        cost,
        spec.rope_length_mode,
        shares_blocks=not (spec.keeps_own_cache or spec.two_sided),
        pooling=spec.pooler.info(),
        pools_from_cache=spec.pooler.reads_last_only,
        whole_texts=spec.two_sided,
        hears=spec.speech is not None,
    )


def build_ready(config: Config, device_limits: DeviceLimits, info: ModelRuntimeInfo) -> Ready:
    """The Ready message for clients. Logs when a GPU's KV cache came out smaller than estimated."""
    limits, block_size = StepLimits.of(config), config.cache.block_size
    longest = limits.length
    held = capacity(info.groups, device_limits.num_blocks, block_size, limits.tokens, longest)
    if held < longest and config.cache.num_gpu_blocks_override is None:
        _log.warning(
            "context     the KV cache holds %d tokens of one sequence, and not %d: longer requests are refused. Raise "
            "--gpu-memory-utilization, or lower --max-num-batched-tokens or --max-num-seqs.", held, longest,
        )  # fmt: skip
    return Ready(
        model=config.model.model,
        max_model_len=longest,
        vocab_size=device_limits.vocab_size,
        num_blocks=device_limits.num_blocks,
        block_size=block_size,
        capacity=held,
        kv_tokens=max_cached_tokens(info.groups, device_limits.num_blocks, block_size, limits.tokens, longest),
        startup=device_limits.startup,
        pooling=info.pooling,
        hears=info.hears,
    )


def estimated_throughput(config: Config, info: ModelRuntimeInfo) -> float:
    """Tokens of prompts and outputs that the engine computes in a second, before it is measured; 0: unknown."""
    return 0.0 if info.cost is None else info.cost.tokens_per_s(StepLimits.of(config).rows)


def build_scheduler(
    config: Config,
    device_limits: DeviceLimits,
    info: ModelRuntimeInfo,
    clock: Clock,
    masked: Callable[[Add], bool] | None = None,
) -> Scheduler:
    """The scheduler of these settings; sequences that are `masked` sample only once their masks are there."""
    limits, scheduler, cache = StepLimits.of(config), config.scheduler, config.cache
    processors = load_processors(config.model.logits_processors)
    states = None
    if device_limits.num_states:
        rule = CheckpointRule(cache.state_spacing, cache.mamba_cache_mode != "none")
        spare = cache.most_retained(device_limits.num_states - limits.rows)
        states = BlockPool(device_limits.num_states, cache.block_size, spare), rule
    pool = BlockPool(device_limits.num_blocks, cache.block_size, cache.most_retained(device_limits.num_blocks))
    return Scheduler(
        pool,
        limits.rows,
        TokenBudget(
            limits.tokens,
            scheduler.long_prefill_token_threshold,
            info.cost,
            device_limits.step_sizes,
            scheduler.performance_mode or "balanced",
            whole_texts=info.whole_texts,
        ),
        _preemption(config, device_limits, info, pool),
        clock,
        groups=info.groups,
        policy=scheduler.scheduling_policy,
        prefix_caching=cache.enable_prefix_caching,
        shares_blocks=info.shares_blocks,
        rope_length_mode=info.rope_length_mode,
        host_bound=partial(takes, processors) if processors else None,
        max_drafts=info.drafts,
        masked=masked,
        pools_from_cache=info.pools_from_cache,
        masked_drafts=device_limits.masked_drafts,
        stages=config.parallel.pipeline_parallel_size,
        states=states,
        media=EncoderCache(info.kept_vectors) if info.kept_vectors else None,
    )


def _preemption(config: Config, device_limits: DeviceLimits, info: ModelRuntimeInfo, pool: BlockPool) -> Preemption:
    """What moves blocks between this pool and the host, as the prefix cache's tier or for preempted requests alone."""
    host, cache, tier = HostPool(), config.cache, None
    if cache.kv_offloading_size is not None and cache.enable_prefix_caching and info.shares_blocks:
        if info.host_index is not None:
            host.index = info.host_index
            host.inherit(device_limits.num_host_blocks)
        host.grow(device_limits.ready_host_blocks)
        estimated_ms = 0.0 if info.cost is None else info.cost.swap_ms(1) / 2
        disk = None
        if (there := device_limits.disk) is not None:
            entries = [(slot, (group, block_hash)) for slot, group, block_hash in there.entries]
            disk = DiskPool(there.num_blocks, entries, there.load_ms)
        load_ms = device_limits.load_block_ms or estimated_ms
        ahead = pool.num_blocks // _SAVED_AHEAD if config.device.device == "cuda" else 0
        tier = HostTier(pool, host, load_ms, info.block_bytes, disk, ahead)
    return Preemption(host, config.scheduler.preemption_mode, info.cost, tier)
