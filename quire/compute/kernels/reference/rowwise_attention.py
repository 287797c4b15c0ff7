"""Attention over a paged KV cache, row by row: writing keys and values, and reading them back through block tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.reference.activation import add_slopes, soft_cap, softmax_with_sinks
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
        qkv: [tokens, heads + 2 · kv_heads, d], as projected, or [tokens, heads + kv_heads, d] if keys are values too or
            values are made of them, or [tokens, heads, d] if nothing is stored; its contents are undefined afterwards
            if there is an update.
        norm_rope: The processing of queries and keys.
        write: Where keys and values go.
        q: [tokens, heads, d], out: the queries, multiplied by their keys' scales if the cache is quantized.
    """
    (keys, values, scales), slot_mapping = write
    form, cos, sin = norm_rope.form, norm_rope.cos, norm_rope.sin
    if norm_rope.update is not None:
        lora_expand(*norm_rope.update, qkv.view(len(qkv), -1))
    if form.clip is not None:
        qkv = qkv.clamp(-form.clip, form.clip)
    heads, kv_heads = q.shape[1], keys.shape[2] if form.stores else 0
    qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
    if form.values != "projected" and form.stores:
        v, projected = torch.empty_like(keys[0, :1].expand(len(qkv), -1, -1), dtype=qkv.dtype), v
        source = qkv[:, heads : heads + kv_heads] if form.values == "keys" else projected
        rms_norm(source.contiguous(), torch.ones_like(source[0]), norm_rope.eps, v)
    if norm_rope.norm is not None and not form.norm_last:
        qk = _normed(qk, norm_rope, heads)
    if cos is not None and sin is not None:
        turned = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
        rotary(qk, cos, sin, turned, form.interleaved)
        qk = turned
    if norm_rope.norm is not None and form.norm_last:
        qk = _normed(qk, norm_rope, heads)
    if norm_rope.query_scale is not None:
        scaled = (qk[:, :heads].float() * norm_rope.query_scale[:, None, None]).to(qk.dtype)
        qk = torch.cat((scaled, qk[:, heads:]), 1)
    if not form.stores:
        of_keys = None if scales is None else scales[0, :, None].repeat_interleave(heads // keys.shape[2], 0)
        q.copy_(qk if of_keys is None else qk.float() * of_keys)
        return
    if scales is None:
        q.copy_(qk[:, :heads])
        keys.flatten(0, 1).index_copy_(0, slot_mapping, qk[:, heads:])
        if values is not keys:
            values.flatten(0, 1).index_copy_(0, slot_mapping, v)
        return
    of_keys, of_values = scales[:, :, None].unbind()
    q.copy_(qk[:, :heads].float() * of_keys.repeat_interleave(heads // kv_heads, 0))
    for cache, x, scale in ((keys, qk[:, heads:], of_keys), (values, v, of_values)):
        cache.view(torch.uint8).flatten(0, 1)[slot_mapping] = quantized(x.float() / scale, cache.dtype).view(
            torch.uint8
        )


def qk_mean_squares(qkv: Tensor, heads: int, kv_heads: int, parts: int, out: Tensor) -> None:
    """Compute the mean squares of a token's queries and keys over all heads, or a part's summand of them.

    Args:
        qkv: [tokens, heads + 2 · kv_heads, d], as projected.
        heads, kv_heads: The numbers of query heads and KV heads.
        parts: The number of equal parts whose results are summed; parts may have KV heads in common.
        out: [tokens, 2] fp32, of queries and of keys.
    """
    d = qkv.shape[2]
    for column, (begin, count) in enumerate(((0, heads), (heads, kv_heads))):
        squares = qkv[:, begin : begin + count].float().square().sum((1, 2))
        out[:, column] = squares / (count * d * parts)


def _normed(qk: Tensor, norm_rope: QKNormRope, heads: int) -> Tensor:
    """Norm queries and keys [tokens, heads + kv_heads, d]."""
    norm, eps, bias, out = norm_rope.norm, norm_rope.eps, norm_rope.bias, qk.new_empty(qk.shape)
    assert norm is not None
    if norm_rope.mean_squares is None and not norm_rope.form.centered:
        rms_norm(qk, norm, eps, out)
        return out
    wide = qk.float()
    if norm_rope.mean_squares is not None:
        factors = (norm_rope.mean_squares + eps).rsqrt()  # [tokens, 2]
        of_heads = [factors[:, :1].expand(-1, heads), factors[:, 1:].expand(-1, qk.shape[1] - heads)]
        wide = wide * torch.cat(of_heads, 1)[:, :, None]
        if norm.dtype == qk.dtype:
            wide = wide.to(qk.dtype).float()
    else:
        wide = F.layer_norm(wide, wide.shape[-1:], eps=eps)
    return out.copy_(wide * norm.float() + (0.0 if bias is None else bias.float()))


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
        seen_from, end = visible_range(mask, start, start + count, start + count)
        blocks = rows.block_table[slot, seen_from // size : -(-end // size)]
        skipped = seen_from % size
        span = slice(skipped, skipped + end - seen_from)
        k, v = (cache.index_select(0, blocks).flatten(0, 1)[span] for cache in (kv.keys, kv.values))
        tokens = slice(first, first + count)
        seen = None  # torch has faster ways for a lone query, which sees all of these keys, and for a whole prompt
        explicit = any(each is not None for each in (scores.cap, scores.sinks, scores.slopes))
        if count > 1 and (count < end or explicit or min(mask.window or end, mask.chunk or end) < end):
            seen = tile_mask(mask, torch.arange(start, end), torch.arange(seen_from, end))
        causal = count > 1 and seen is None and not mask.two_sided
        if kv.scales is None:
            out[tokens] = _attend(q[tokens], k, v, seen, causal, scores, start - seen_from)
        else:
            values = v.float() * kv.scales[1, :, None]
            wide = _attend(q[tokens].float(), k.float(), values, seen, causal, scores, start - seen_from)
            out[tokens] = wide.to(out.dtype)
        first += count


def quantized(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 to the nearest value of a cache's dtype, ties to even; NaN stays NaN where the dtype has one."""
    if dtype == torch.int8:
        return x.round().clamp_(-LARGEST[dtype], LARGEST[dtype]).nan_to_num_(0).to(dtype)
    most = LARGEST[dtype]
    return x.clamp(-most, most).to(dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, causal: bool, scores: Scores, before: int) -> Tensor:
    """Compute attention of queries q [n, heads, d] over some of k and v [length, kv_heads, d] → [n, heads, d].

    `before` of the keys stand before the first query. `seen` is [n, length] bool; None: queries see all keys, or, if
    they are a whole prompt's (`causal`), those up to their own.
    """
    (n, heads, d), (length, kv_heads, _) = q.shape, k.shape
    grouped = q.view(n, kv_heads, heads // kv_heads, d).permute(1, 2, 0, 3)  # [kv_heads, group, n, d]
    shape = (kv_heads, heads // kv_heads, length, d)
    k, v = k.transpose(0, 1).unsqueeze(1).expand(shape), v.transpose(0, 1).unsqueeze(1).expand(shape)
    if scores.cap is None and scores.sinks is None and scores.slopes is None:
        o = F.scaled_dot_product_attention(grouped, k, v, seen, is_causal=causal, scale=scores.scale)
    else:
        products = (grouped @ k.transpose(-1, -2)).float().mul_(scores.scale)
        if scores.cap is not None:
            soft_cap(products, scores.cap)
        if scores.slopes is not None:
            add_slopes(products, scores.slopes, torch.arange(before, before + n), torch.arange(length))
        if seen is not None:
            products.masked_fill_(~seen, float("-inf"))
        o = softmax_with_sinks(products, scores.sinks).to(v.dtype) @ v
    return o.permute(2, 0, 1, 3).reshape(n, heads, d)
