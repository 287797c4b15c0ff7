"""The KV cache's tensors, on the device and on the host."""

from __future__ import annotations

import math

import torch

from quire.attention.backend import KVView
from quire.errors import MemoryBudgetError
from quire.models.spec import ModelSpec
from quire.worker.kv_transfer import BlockTransfer, CpuBlockTransfer, GpuBlockTransfer
from quire.worker.startup.host_memory import lazy_zeros

_GIB = 2**30


def allocate_kv_cache(
    spec: ModelSpec, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Zeroed keys and values of `blocks` blocks and the dummy, block 0: [storages, 2, blocks + 1, block_size, kv_heads,
    head_dim]. Layers of different groups share a storage.

    Raises:
        MemoryBudgetError: There is not that much memory.
    """
    storages = max(len(group.layers) for group in spec.kv_groups())
    return _allocate(
        (storages, 2, blocks + 1, block_size, spec.kv_heads, spec.head_dim),
        dtype,
        device,
        f"The KV cache of {blocks} blocks" if blocks else "Even one block of KV cache",
        "lower --gpu-memory-utilization, --kv-cache-memory-bytes or --num-gpu-blocks-override"
        if blocks
        else "free memory, or give a smaller model",
    )


def kv_view(storage: torch.Tensor, spec: ModelSpec) -> KVView:
    """The storage as attention sees it, layer by layer."""
    groups = spec.kv_groups()
    keys, values = list(storage[:, 0]), list(storage[:, 1])
    place = {layer: (number, i) for number, group in enumerate(groups) for i, layer in enumerate(group.layers)}
    places = [place[layer] for layer in range(spec.layers)]
    return KVView(
        keys=tuple(keys[i] for _, i in places),
        values=tuple(values[i] for _, i in places),
        groups=tuple(number for number, _ in places),
        windows=tuple(group.window for group in groups),
        block_size=storage.shape[3],
    )


def block_transfer(storage: torch.Tensor, host_blocks: int) -> BlockTransfer:
    """The mover of whole blocks, with a host pool of `host_blocks`.

    Raises:
        MemoryBudgetError: There is not that much host memory.
    """
    flat = storage.flatten(0, 1)  # [2 · storages, blocks, …]
    if storage.device.type != "cpu":
        return GpuBlockTransfer(flat, host_blocks)
    shape = (len(flat), host_blocks, *flat.shape[2:])
    what = f"A swap space of {host_blocks} blocks"
    host = _allocate(shape, storage.dtype, storage.device, what, "lower --swap-space")
    return CpuBlockTransfer(flat, host)


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, what: str, advice: str) -> torch.Tensor:
    try:
        return lazy_zeros(shape, dtype, device)
    except (RuntimeError, MemoryError, ValueError):
        size = math.prod(shape) * dtype.itemsize / _GIB
        raise MemoryBudgetError(f"{what} needs {size:.1f} GiB, which this machine cannot give: {advice}.") from None
