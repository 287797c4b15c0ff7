"""How a GPU's memory will be shared out, estimated before anything is loaded.

The worker measures what weights and the largest step really take, and the KV cache gets the rest; this decides how long
a sequence may be, and finds out early what cannot fit.
"""

from __future__ import annotations

from quire.config import Config
from quire.errors import MemoryBudgetError
from quire.kvcache.groups import blocks_of
from quire.models.spec import ModelSpec
from quire.planning.footprint import Footprint, device_activation_bytes
from quire.planning.machine import Gpu
from quire.planning.memory_plan import AUTO_LENGTH, GIB, Sharing, asked_blocks, most, reaches_of, share_of_memory, size
from quire.planning.step_limits import StepLimits

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
    share = share_of_memory(cache)
    weights = spec.weight_bytes(dtype)
    asked = config.model.max_model_len
    is_auto = asked in ("auto", AUTO_LENGTH)
    limit = spec.max_model_len if is_auto else int(asked or spec.max_model_len)
    activations = device_activation_bytes(spec, dtype, cache.block_size, StepLimits(rows, tokens, limit))
    others = gpu.memory_bytes - gpu.free_bytes
    room = int(share * gpu.memory_bytes) - others - weights - activations
    block_bytes = spec.kv_block_bytes(dtype, cache.block_size)
    given = asked_blocks(cache, block_bytes)
    blocks, reason = max(0, room) // block_bytes, f"what {share:.0%} of the GPU leaves, measured at the start"
    if given is not None:
        blocks, reason = given, "as asked"
    groups = reaches_of(spec)

    def needed(length: int) -> int:
        return blocks_of(groups, length, tokens, cache.block_size)

    longest = most(lambda length: needed(length) <= blocks, spec.max_model_len)
    length = max(2, longest) if is_auto else limit
    is_exact = cache.num_gpu_blocks_override is not None  # and then never doubted
    if blocks < 1 or (needed(length) > blocks and not is_exact):
        needs = f"One sequence of {length:,} tokens needs {size(needed(length) * block_bytes)} of KV cache"
        auto = f"--max-model-len auto (here {longest:,} tokens)" if longest > 1 else ""
        if given is not None:
            raise MemoryBudgetError(
                f"{needs}, more than --kv-cache-memory-bytes {cache.kv_cache_memory_bytes}: raise it, or give "
                f"{auto or 'a smaller model'}."
            )
        raise MemoryBudgetError(
            f"{needs}; of {share:.0%} of {gpu.name}'s {size(gpu.memory_bytes)}, others have {size(others)}, weights "
            f"take {size(weights)} and activations about {size(activations)}, so {size(blocks * block_bytes)} are "
            f"left: {f'give {auto}, ' if auto else ''}raise --gpu-memory-utilization, or give a smaller model."
        )
    swap = min(int(cache.swap_space * GIB), int(SWAP_SHARE * host_bytes)) // block_bytes
    swap = max(0, min(swap, rows * needed(length)))
    footprint = Footprint(weights, activations, (blocks + 1) * block_bytes, swap * block_bytes)
    return Sharing(length, blocks, swap, footprint, reason, estimated=given is None)
