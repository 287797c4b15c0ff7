"""How a GPU's memory will be shared out, estimated before anything is loaded.

The worker measures what weights and the largest step really take, and the KV cache gets the rest; this decides how long
a sequence may be, and finds out early what cannot fit.
"""

from __future__ import annotations

from quire.config import Config
from quire.costmodel.memory import Footprint, LargestStep, device_activation_bytes
from quire.engine.machine import Gpu
from quire.engine.memory import AUTO_LENGTH, GIB, UTILIZATION, Sharing, most, reaches_of, size
from quire.errors import ConfigError, MemoryBudgetError
from quire.kvcache.groups import blocks_of
from quire.models.spec import ModelSpec

SWAP_SHARE = 0.5
"""Of the host's memory that is available, at most."""


def share_out_on(gpu: Gpu, config: Config, spec: ModelSpec, host_bytes: int) -> Sharing:
    """Decide, from settings whose dtype and batch are resolved.

    Raises:
        ConfigError: A setting cannot be meant.
        MemoryBudgetError: The weights, or one sequence of the length that was asked for, do not fit.
    """
    cache, scheduler, dtype = config.cache, config.scheduler, config.model.dtype
    rows, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    assert rows and tokens, "the batch is resolved first"
    share = UTILIZATION if cache.gpu_memory_utilization is None else cache.gpu_memory_utilization
    if not 0 < share <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization {share:g} is no share of memory: give more than 0, at most 1.",
            param="gpu_memory_utilization",
        )
    weights = spec.weight_bytes(dtype)
    activations = device_activation_bytes(spec, dtype, LargestStep(tokens, rows, tokens))
    others = gpu.memory_bytes - gpu.free_bytes
    room = int(share * gpu.memory_bytes) - others - weights - activations
    block_bytes = spec.kv_block_bytes(dtype, cache.block_size)
    blocks, reason = max(0, room) // block_bytes, f"what {share:.0%} of the GPU leaves, measured at the start"
    estimated = cache.num_gpu_blocks_override is None and cache.kv_cache_memory_bytes is None
    if cache.num_gpu_blocks_override is not None:
        blocks, reason = cache.num_gpu_blocks_override, "as asked"
    elif cache.kv_cache_memory_bytes is not None:
        blocks, reason = cache.kv_cache_memory_bytes // block_bytes, "as asked"
    groups = reaches_of(spec)

    def needed(length: int) -> int:
        return blocks_of(groups, length, tokens, cache.block_size)

    longest = most(lambda length: needed(length) <= blocks, spec.max_model_len)
    asked = config.model.max_model_len
    length = max(2, longest) if asked in ("auto", AUTO_LENGTH) else int(asked or spec.max_model_len)
    is_exact = cache.num_gpu_blocks_override is not None  # and then never doubted
    if blocks < 1 or (needed(length) > blocks and not is_exact):
        auto = f"give --max-model-len auto (here {longest:,} tokens), " if longest > 1 else ""
        raise MemoryBudgetError(
            f"One sequence of {length:,} tokens needs {size(needed(length) * block_bytes)} of KV cache; of {share:.0%} "
            f"of {gpu.name}'s {size(gpu.memory_bytes)}, others have {size(others)}, weights take {size(weights)} and "
            f"activations about {size(activations)}, so {size(blocks * block_bytes)} are left: {auto}raise "
            "--gpu-memory-utilization, or give a smaller model."
        )
    swap = min(int(cache.swap_space * GIB), int(SWAP_SHARE * host_bytes)) // block_bytes
    swap = max(0, min(swap, rows * needed(length)))
    footprint = Footprint(weights, activations, (blocks + 1) * block_bytes, swap * block_bytes)
    return Sharing(length, blocks, swap, footprint, reason, estimated)
