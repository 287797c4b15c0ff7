"""Allocates the KV cache on the device and the host pool, and views the cache by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import torch

from quire.compute.attention.backend import KVView
from quire.compute.kernels.reference.attention_inputs import Mask, PagedKV
from quire.errors import ConfigError, MemoryBudgetError
from quire.models.spec import ModelSpec
from quire.runtime.worker.host_memory import lazy_zeros
from quire.runtime.worker.kv_transfer import BlockTransfer, CpuBlockTransfer, GpuBlockTransfer, JoinedTransfer
from quire.scheduling.kvcache.cache_groups import CacheForm, Chunk, Full, Reach, Window, block_elements

_GIB = 2**30
DENSE = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""The dtypes in which a model may be computed, by name."""
ELEMENTS = DENSE | {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
"""The dtypes in which a KV cache may be stored, by the names of `foundation/config/cache.py`."""


@dataclass(frozen=True)
class KVCache:
    """The tensors of a KV cache. Block 0 is the dummy.

    KV groups share all of them: the i-th layer of each group uses part i, in blocks of its own. If attention is
    two-sided, all layers of a group use the only part, one after the other.

    Attributes:
        tensors: [layers of a block, planes, num_blocks + 1, block_size, *a token's shape] each: all adjacent planes of
            one shape.
        unequal: Whether layers cache different amounts. Then tensors are [1, 1, num_blocks + 1, block_size, elements
            of a block's token], one for each plane; a block's parts lie behind one another, and each group divides
            blocks into parts of its own.
    """

    tensors: tuple[torch.Tensor, ...]
    unequal: bool = False

    def planes_of(self, part: int, form: CacheForm) -> list[torch.Tensor]:
        """Return the planes of a part of a group whose layers have this form, [num_blocks + 1, block_size, *a token's
        shape] each. With `unequal` they are longer, and block b begins at entry b · `ModelSpec.block_entries`."""
        if not self.unequal:
            return [plane for tensor in self.tensors for plane in tensor[part].unbind()]
        planes = []
        for tensor, plane in zip(self.tensors, form.planes, strict=True):
            each = tensor.shape[3] * plane.elements
            planes.append(tensor.view(-1)[part * each :].view(-1, tensor.shape[3], *plane.shape))
        return planes


def allocate_kv_cache(
    spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Allocate a zeroed KV cache of `num_blocks` blocks and the dummy.

    Raises:
        MemoryBudgetError: There is not enough memory.
    """
    forms = list(dict.fromkeys(group.form for group in spec.kv_groups() if group.layers))
    if not forms:  # no layer of this rank caches anything of tokens
        return KVCache(())
    form, *others = forms
    what = f"The KV cache of {num_blocks} blocks" if num_blocks else "Even one block of KV cache"
    advice = "free memory, or give a smaller model"
    if num_blocks:
        advice = "lower --gpu-memory-utilization, --kv-cache-memory-bytes or --num-gpu-blocks-override"
    if others:
        whole = block_elements(spec.kv_groups())
        sizes = [whole * plane.elements // form.elements for plane in form.planes]
        shapes: list[tuple[int, ...]] = [(1, 1, num_blocks + 1, block_size, size) for size in sizes]
    else:
        layers = spec.block_parts[0]
        planes = [(shape, len(list(alike))) for shape, alike in groupby(plane.shape for plane in form.planes)]
        shapes = [(layers, number, num_blocks + 1, block_size, *shape) for shape, number in planes]
    return KVCache(tuple(_allocate(shape, dtype, device, what, advice) for shape in shapes), bool(others))


def kv_view(kv_cache: KVCache, spec: ModelSpec, scales: torch.Tensor | None = None) -> KVView:
    """Return the KV cache by layer, as attention reads it. `scales` [layers, 2, kv_heads] fp32 belong to a quantized
    cache. Layers that cache nothing of tokens have the first group's tensors, which nobody reads for them."""
    groups = spec.kv_groups()
    if not kv_cache.tensors:
        return KVView((), (), ())
    used = next(group for group in groups if group.layers)
    by_layer = {layer: (number, i) for number, group in enumerate(groups) for i, layer in enumerate(group.layers)}
    positions = [by_layer.get(source, (groups.index(used), 0)) for source in spec.sources]
    if spec.two_sided:
        positions = [(number, 0) for number, _ in positions]
    of_layers: Sequence[torch.Tensor | None] = [None] * len(spec.layers)
    if scales is not None:  # of as many heads as the widest layer has
        heads = [mixer.kv_heads for mixer in spec.mixers]
        of_layers = [scales[source][:, : heads[source]].contiguous() for source in spec.sources]
    planes = [kv_cache.planes_of(part, groups[number].form) for number, part in positions]
    return KVView(
        layers=tuple(_paged_kv(each, own) for each, own in zip(planes, of_layers, strict=True)),
        groups=tuple(number for number, _ in positions),
        masks=tuple(mask_of(group.reach, spec.two_sided) for group in groups),
        spans_in_windows=getattr(spec.vision, "in_windows", False),
    )


def _paged_kv(planes: list[torch.Tensor], scales: torch.Tensor | None) -> PagedKV:
    """Return planes as keys and values; latents are the keys of one head, which are values too."""
    keys, *others = planes
    if others:
        return PagedKV(keys, others[0], scales)
    latents = keys.unsqueeze(2)
    return PagedKV(latents, latents, scales)


def mask_of(reach: Reach, two_sided: bool = False) -> Mask:
    """Return the mask of layers that look back so far, and maybe ahead."""
    match reach:
        case Full():
            return Mask(two_sided=two_sided)
        case Window(length):
            return Mask(window=length, two_sided=two_sided)
        case Chunk(length):
            return Mask(chunk=length, two_sided=two_sided)


def whole_group(spec: ModelSpec) -> int:
    """Return the number of the KV group whose layers see everything, and whose blocks hold whole sequences.

    Raises:
        ConfigError: All groups have a window or chunks, so a draft model cannot keep its keys beside the model's.
    """
    for number, group in enumerate(spec.kv_groups()):
        if group.reach.length is None:
            return number
    raise ConfigError(
        "All layers of this model have a sliding window or chunks, so a draft model cannot follow it: use "
        '--speculative-config with "method": "ngram".',
        param="speculative_config",
    )


def cache_transfer(
    kv_cache: KVCache, num_host_blocks: int, *others: torch.Tensor, memory: memoryview | None = None
) -> BlockTransfer:
    """Make a transfer of the blocks of a KV cache, and of those of the same ids in other tensors. Host blocks lie in
    `memory`, if it is given.

    Raises:
        MemoryBudgetError: There is not enough host memory.
    """
    tensors = (*(tensor.flatten(0, 1) for tensor in kv_cache.tensors), *others)
    if not tensors:  # nothing is cached of tokens
        return CpuBlockTransfer(torch.empty(0, 1), torch.empty(0, 0))
    if memory is None:
        first, *more = (block_transfer(blocks, num_host_blocks) for blocks in tensors)
    else:
        ends = [0, *accumulate(num_host_blocks * blocks[:, 0].nbytes for blocks in tensors)]
        assert ends[-1] <= len(memory), "host blocks do not fit their memory"
        parts = (memory[start:end] for start, end in pairwise(ends))
        first, *more = (
            block_transfer(blocks, num_host_blocks, part) for blocks, part in zip(tensors, parts, strict=True)
        )
    return JoinedTransfer(first, *more) if more else first


def block_transfer(blocks: torch.Tensor, num_host_blocks: int, memory: memoryview | None = None) -> BlockTransfer:
    """Make a transfer of whole blocks within a tensor [storages, blocks, …], and to and from a host pool, on a CPU in
    `memory` of its size, if that is given.

    Raises:
        MemoryBudgetError: There is not enough host memory.
    """
    if blocks.element_size() == 1:
        blocks = blocks.view(torch.uint8)  # torch supports fewer operations on floats of 8 bits
    if blocks.device.type != "cpu":
        return GpuBlockTransfer(blocks, num_host_blocks)
    shape = (len(blocks), num_host_blocks, *blocks.shape[2:])
    if memory is not None and num_host_blocks:
        return CpuBlockTransfer(blocks, torch.frombuffer(memory, dtype=blocks.dtype).view(shape))
    what, lower = f"Host memory for {num_host_blocks} blocks", "lower --kv-offloading-size or --swap-space"
    return CpuBlockTransfer(blocks, _allocate(shape, blocks.dtype, blocks.device, what, lower))


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, what: str, advice: str) -> torch.Tensor:
    try:
        return lazy_zeros(shape, dtype, device)
    except (RuntimeError, MemoryError, ValueError):
        size = math.prod(shape) * dtype.itemsize / _GIB
        raise MemoryBudgetError(f"{what} needs {size:.1f} GiB, which this machine cannot give: {advice}.") from None
