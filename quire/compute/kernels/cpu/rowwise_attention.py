"""Attention over a paged KV cache by our own kernels, in bf16 and fp32; the cache may be quantized.

Also where a step's tokens go in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.kernels.cpu.library import QUANTIZED_CACHES, address, library
from quire.compute.kernels.cpu.lora import lora_expand
from quire.compute.kernels.cpu.norm import serves_weight
from quire.compute.kernels.reference import paged_attention as paged_attention_reference
from quire.compute.kernels.reference import rowwise_attention as reference
from quire.compute.kernels.reference.attention_inputs import (
    CacheWrite,
    Mask,
    NormRopeForm,
    PagedKV,
    PagedRows,
    QKNormRope,
    Scores,
)


def qk_norm_rope_and_cache(qkv: Tensor, norm_rope: QKNormRope, write: CacheWrite, q: Tensor) -> None:
    """Arguments as in reference/rowwise_attention.py."""
    norm, eps, cos, sin, update, form, bias, mean_squares, query_scale = norm_rope
    (keys, values, scales), slot_mapping = write
    tokens, heads, d = q.shape
    if update is not None:
        lora_expand(*update, qkv.view(len(qkv), -1))
    kernels = library()
    rest = (cos, sin, keys, values, slot_mapping, q, bias, mean_squares, query_scale)
    whole = qkv.stride()[1:] == (d, 1) and not [t for t in rest if t is not None and not t.is_contiguous()]
    served = kernels is not None and whole and kernels.serves(qkv, cos, sin, q)
    name = _name("qk_norm_rope_and_cache", qkv, keys, scales)
    weighted = norm is None or (serves_weight(norm, qkv) and (bias is None or bias.dtype == norm.dtype))
    if kernels is None or not served or name is None or not weighted:
        reference.qk_norm_rope_and_cache(qkv, norm_rope._replace(update=None), write, q)
        return
    kernels(
        name, qkv.dtype, qkv.data_ptr(), qkv.stride(0), tokens, heads, keys.shape[2], d, address(norm), address(bias),
        norm is not None and norm.dtype == torch.float32, eps, address(cos), address(sin),
        0 if cos is None else cos.shape[1], slot_mapping.data_ptr(), keys.data_ptr(), values.data_ptr(), q.data_ptr(),
        address(scales), _flags(form), form.clip or 0.0, address(mean_squares), address(query_scale),
    )  # fmt: skip


def _flags(form: NormRopeForm) -> int:
    """Return the flags that native/rows.cpp names."""
    values = {"projected": 0, "normed": 8, "keys": 24}[form.values]
    return form.interleaved + 2 * form.centered + 4 * form.norm_last + values + 32 * (not form.stores)


def qk_mean_squares(qkv: Tensor, heads: int, kv_heads: int, parts: int, out: Tensor) -> None:
    """Arguments as in reference/rowwise_attention.py."""
    kernels, (tokens, _, d) = library(), qkv.shape
    if kernels is None or qkv.stride()[1:] != (d, 1) or not kernels.serves(qkv):
        reference.qk_mean_squares(qkv, heads, kv_heads, parts, out)
        return
    assert out.is_contiguous() and out.dtype == torch.float32
    kernels("qk_mean_squares", qkv.dtype, qkv, qkv.stride(0), tokens, heads * d, kv_heads * d, parts, out)


def paged_attention(q: Tensor, kv: PagedKV, rows: PagedRows, mask: Mask, scores: Scores, out: Tensor) -> None:
    """Arguments as in reference/rowwise_attention.py."""
    kernels = library()
    keys, values, scales = kv
    table, slots, starts, counts = rows
    heads, d = q.shape[1:]
    kv_heads = keys.shape[2]
    strides = keys.stride()
    caches = strides == values.stride() and strides[1:] == (kv_heads * d, d, 1)
    whole = q.is_contiguous() and out.is_contiguous() and table.stride(1) == 1 and caches
    name = _name("paged_attention", q, keys, scales)
    if kernels is None or not whole or d % 2 or name is None or not kernels.serves(q, out):
        reference.paged_attention(q, kv, rows, mask, scores, out)
        return
    kernels(
        name, q.dtype, q.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(), table.data_ptr(),
        table.stride(0), slots.data_ptr(), starts.data_ptr(), counts.data_ptr(), counts.shape[0], heads, kv_heads, d,
        keys.shape[1], strides[0], mask.window or 0, mask.chunk or 0, mask.two_sided, scores.scale,
        scores.cap or 0.0, address(scales), address(scores.sinks), address(scores.slopes),
    )  # fmt: skip


def _name(op: str, x: Tensor, cache: Tensor, scales: Tensor | None) -> str | None:
    """Return the name of the kernel for a cache with x's dtype or a quantized one; None: there is no kernel."""
    if scales is None:
        return op if cache.dtype == x.dtype else None
    kind = QUANTIZED_CACHES.get(cache.dtype)
    return None if kind is None else f"{op}_{kind}"


def compute_slot_mapping(
    block_table: Tensor, slots: Tensor, positions: Tensor, block_size: int, slot_mapping: Tensor
) -> None:
    """Arguments as in reference/paged_attention.py."""
    kernels = library()
    whole = all(tensor.is_contiguous() for tensor in (block_table, slots, positions, slot_mapping))
    if kernels is None or not whole:
        paged_attention_reference.compute_slot_mapping(block_table, slots, positions, block_size, slot_mapping)
        return
    kernels(
        "compute_slot_mapping", None, block_table.data_ptr(), block_table.stride(0), slots.data_ptr(),
        positions.data_ptr(), len(positions), block_size, slot_mapping.data_ptr(),
    )  # fmt: skip
