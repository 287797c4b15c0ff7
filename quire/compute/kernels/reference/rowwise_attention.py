"""Attention over a paged KV cache, row by row: writing keys and values, and reading them back through block tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.reference.activation import soft_cap
from quire.compute.kernels.reference.attention_inputs import (
    CacheWrite,
    Mask,
    PagedKV,
    PagedRows,
    QKNormRope,
    Scores,
    tile_mask,
    visible_range,
)
from quire.compute.kernels.reference.lora import lora_expand
from quire.compute.kernels.reference.norm import rms_norm
from quire.compute.kernels.reference.quantized_rows import LARGEST
from quire.compute.kernels.reference.rotary import rotary


def qk_norm_rope_and_cache(qkv: Tensor, norm_rope: QKNormRope, write: CacheWrite, q: Tensor) -> None:
    """Norm and rotate queries and keys; store each token's key and value at its place.

    Args:
        qkv: [tokens, heads + 2 · kv_heads, d], as projected; its contents are undefined afterwards if there is an
            update.
        norm_rope: The processing of queries and keys.
        write: Where keys and values go.
        q: [tokens, heads, d], out: the queries, multiplied by their keys' scales if the cache is quantized.
    """
    norm, eps, cos, sin, update = norm_rope
    (keys, values, scales), slot_mapping = write
    if update is not None:
        lora_expand(*update, qkv.view(len(qkv), -1))
    heads, kv_heads = q.shape[1], keys.shape[2]
    qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
    if norm is not None:
        normed = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
        rms_norm(qk, norm, eps, normed)
        qk = normed
    if cos is not None and sin is not None:
        turned = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
        rotary(qk, cos, sin, turned)
        qk = turned
    if scales is None:
        q.copy_(qk[:, :heads])
        keys.flatten(0, 1).index_copy_(0, slot_mapping, qk[:, heads:])
        values.flatten(0, 1).index_copy_(0, slot_mapping, v)
        return
    of_keys, of_values = scales[:, :, None].unbind()
    q.copy_(qk[:, :heads].float() * of_keys.repeat_interleave(heads // kv_heads, 0))
    for cache, x, scale in ((keys, qk[:, heads:], of_keys), (values, v, of_values)):
        cache.view(torch.uint8).flatten(0, 1)[slot_mapping] = quantized(x.float() / scale, cache.dtype).view(
            torch.uint8
        )


def paged_attention(q: Tensor, kv: PagedKV, rows: PagedRows, mask: Mask, scores: Scores, out: Tensor) -> None:
    """Compute attention of each row's tokens over the keys they see, whether a row has one token or many.

    Args:
        q: [tokens, heads, d], the rows' tokens, row by row.
        kv: The paged cache, with the step's own keys and values.
        rows: The step's rows.
        mask, scores: The layer's.
        out: [tokens, heads, d].
    """
    first, size = 0, kv.keys.shape[1]
    columns = (rows.slots.tolist(), rows.starts.tolist(), rows.counts.tolist())
    for slot, start, count in zip(*columns, strict=True):
        seen_from, end = visible_range(mask, start, start + count)
        blocks = rows.block_table[slot, seen_from // size : -(-end // size)]
        skipped = seen_from % size
        span = slice(skipped, skipped + end - seen_from)
        k, v = (cache.index_select(0, blocks).flatten(0, 1)[span] for cache in (kv.keys, kv.values))
        tokens = slice(first, first + count)
        seen = None  # torch has faster ways for a lone query, which sees all of these keys, and for a whole prompt
        if count > 1 and (count < end or scores.cap is not None or (mask.window or end) < end):
            seen = tile_mask(mask, torch.arange(start, end), torch.arange(seen_from, end))
        if kv.scales is None:
            out[tokens] = _attend(q[tokens], k, v, seen, scores)
        else:
            wide = _attend(q[tokens].float(), k.float(), v.float() * kv.scales[1, :, None], seen, scores)
            out[tokens] = wide.to(out.dtype)
        first += count


def quantized(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 to the nearest value of a cache's dtype, ties to even; NaN stays NaN where the dtype has one."""
    if dtype == torch.int8:
        return x.round().clamp_(-LARGEST[dtype], LARGEST[dtype]).nan_to_num_(0).to(dtype)
    most = LARGEST[dtype]
    return x.clamp(-most, most).to(dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scores: Scores) -> Tensor:
    """Compute attention of queries q [n, heads, d] over some of k and v [length, kv_heads, d] → [n, heads, d].

    `seen` is [n, length] bool; None: a lone query sees all keys, and several are a whole prompt's.
    """
    (n, heads, d), (length, kv_heads, _) = q.shape, k.shape
    grouped = q.view(n, kv_heads, heads // kv_heads, d).permute(1, 2, 0, 3)  # [kv_heads, group, n, d]
    shape = (kv_heads, heads // kv_heads, length, d)
    k, v = k.transpose(0, 1).unsqueeze(1).expand(shape), v.transpose(0, 1).unsqueeze(1).expand(shape)
    if scores.cap is None:
        causal = n > 1 and seen is None
        o = F.scaled_dot_product_attention(grouped, k, v, seen, is_causal=causal, scale=scores.scale)
    else:
        products = (grouped @ k.transpose(-1, -2)).float().mul_(scores.scale)
        soft_cap(products, scores.cap)
        if seen is not None:
            products.masked_fill_(~seen, float("-inf"))
        o = products.softmax(-1).to(v.dtype) @ v
    return o.permute(2, 0, 1, 3).reshape(n, heads, d)
