"""Allocates the KV cache on the device and the host pool, and views the cache by layer."""

from __future__ import annotations

import math

import torch

from quire.compute.attention.backend import KVView
from quire.compute.kernels.reference.attention_inputs import Mask, PagedKV
from quire.errors import ConfigError, MemoryBudgetError
from quire.models.spec import ModelSpec
from quire.runtime.worker.host_memory import lazy_zeros
from quire.runtime.worker.kv_transfer import BlockTransfer, CpuBlockTransfer, GpuBlockTransfer

_GIB = 2**30
DENSE = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""The dtypes in which a model may be computed, by name."""
ELEMENTS = DENSE | {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
"""The dtypes in which a KV cache may be stored, by the names of `foundation/config/cache.py`."""


def allocate_kv_cache(
    spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocate zeroed keys and values, [layers of a group, 2, num_blocks + 1, block_size, kv_heads, head_dim].

    Block 0 is the dummy. KV groups share the tensor: the i-th layer of each group uses part i, in blocks of its own.

    Raises:
        MemoryBudgetError: There is not enough memory.
    """
    layers = max(len(group.layers) for group in spec.kv_groups())
    return _allocate(
        (layers, 2, num_blocks + 1, block_size, spec.attention.kv_heads, spec.attention.head_dim),
        dtype,
        device,
        f"The KV cache of {num_blocks} blocks" if num_blocks else "Even one block of KV cache",
        "lower --gpu-memory-utilization, --kv-cache-memory-bytes or --num-gpu-blocks-override"
        if num_blocks
        else "free memory, or give a smaller model",
    )


def kv_view(kv_cache: torch.Tensor, spec: ModelSpec, scales: torch.Tensor | None = None) -> KVView:
    """Return the KV cache by layer, as attention reads it. `scales` [layers, 2, kv_heads] fp32 belong to a quantized
    cache."""
    groups = spec.kv_groups()
    by_layer = {layer: (number, i) for number, group in enumerate(groups) for i, layer in enumerate(group.layers)}
    positions = [by_layer[layer] for layer in range(len(spec.layers))]
    of_layers = [None] * len(spec.layers) if scales is None else scales.unbind()
    return KVView(
        layers=tuple(
            PagedKV(kv_cache[i, 0], kv_cache[i, 1], own) for (_, i), own in zip(positions, of_layers, strict=True)
        ),
        groups=tuple(number for number, _ in positions),
        masks=tuple(Mask(group.window, group.chunk) for group in groups),
    )


def whole_group(spec: ModelSpec) -> int:
    """Return the number of the KV group whose layers see everything, and whose blocks hold whole sequences.

    Raises:
        ConfigError: All groups have a window or chunks, so a draft model cannot keep its keys beside the model's.
    """
    for number, group in enumerate(spec.kv_groups()):
        if group.reach is None:
            return number
    raise ConfigError(
        "All layers of this model have a sliding window or chunks, so a draft model cannot follow it: use "
        '--speculative-config with "method": "ngram".',
        param="speculative_config",
    )


def block_transfer(blocks: torch.Tensor, num_host_blocks: int) -> BlockTransfer:
    """Make a transfer of whole blocks within a tensor [storages, blocks, …], and to and from a host pool.

    Raises:
        MemoryBudgetError: There is not enough host memory.
    """
    if blocks.element_size() == 1:
        blocks = blocks.view(torch.uint8)  # torch supports fewer operations on floats of 8 bits
    if blocks.device.type != "cpu":
        return GpuBlockTransfer(blocks, num_host_blocks)
    shape = (len(blocks), num_host_blocks, *blocks.shape[2:])
    what = f"A swap space of {num_host_blocks} blocks"
    return CpuBlockTransfer(blocks, _allocate(shape, blocks.dtype, blocks.device, what, "lower --swap-space"))


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, what: str, advice: str) -> torch.Tensor:
    try:
        return lazy_zeros(shape, dtype, device)
    except (RuntimeError, MemoryError, ValueError):
        size = math.prod(shape) * dtype.itemsize / _GIB
        raise MemoryBudgetError(f"{what} needs {size:.1f} GiB, which this machine cannot give: {advice}.") from None
