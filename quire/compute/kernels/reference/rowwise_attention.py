"""Attention over a paged KV cache, row by row: writing keys and values, and reading them back through block tables.

Keys and values are [blocks, block_size, kv_heads, d]. Query heads come in `heads / kv_heads` per KV head, adjacent.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.reference.activation import soft_cap
from quire.compute.kernels.reference.lora import RowUpdate, lora_expand
from quire.compute.kernels.reference.norm import rms_norm
from quire.compute.kernels.reference.quantized_rows import LARGEST
from quire.compute.kernels.reference.rotary import rotary


def qk_norm_rope_and_cache(
    qkv: Tensor,
    norm: Tensor | None,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    update: RowUpdate | None,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    q: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Norm and rotate queries and keys; store each token's key and value at its place.

    Args:
        qkv: [tokens, heads + 2 · kv_heads, d], as projected; what becomes of it is open where there is an update.
        norm: [heads + kv_heads, d], the weight of a norm of each head of queries and keys (see rms_norm); None: none.
        eps: Of that norm.
        cos, sin: [tokens, r/2] (see rotary); None: nothing is rotated.
        update: Added to qkv before all else; None: nothing is.
        keys, values: [blocks, block_size, kv_heads, d], written in place.
        slot_mapping: [tokens] int64, block · block_size + offset.
        q: [tokens, heads, d], the queries that come out.
        scales: [2, kv_heads] fp32 where keys and values are quantized: they are stored divided by these, and queries
            come out multiplied with their head's of keys. None: as they are.
    """
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


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    window: int | None,
    out: Tensor,
    scale: float,
    cap: float | None = None,
    scales: Tensor | None = None,
) -> None:
    """Each row's tokens, causally, over what is before them and themselves: one token or many, there is no difference.

    Args:
        q: [tokens, heads, d], the rows' tokens one row behind another.
        keys, values: [blocks, block_size, kv_heads, d]; `heads / kv_heads` query heads, adjacent, share a KV head. The
            step's own are among them. What no token sees may hold anything, a NaN too.
        table: [slots, n] int64, block ids; entries of blocks that no token sees are not used.
        slots: [rows] int64, each row's line in the table.
        starts: [rows] int64, tokens that each row has before the step.
        counts: [rows] int64, tokens of each row in the step.
        window: How many tokens a token sees, itself included; None: all before it.
        out: [tokens, heads, d].
        scale: Of the products.
        cap: A bound c of the scores, c · tanh(score / c), if there is one.
        scales: See qk_norm_rope_and_cache; queries are multiplied already.
    """
    first, size = 0, keys.shape[1]
    for slot, start, count in zip(slots.tolist(), starts.tolist(), counts.tolist(), strict=True):
        seen_from = 0 if window is None else max(0, start + 1 - window)
        blocks = table[slot, seen_from // size : -(-(start + count) // size)]
        skipped = seen_from % size
        span = slice(skipped, skipped + start + count - seen_from)
        k, v = (cache.index_select(0, blocks).flatten(0, 1)[span] for cache in (keys, values))
        tokens = slice(first, first + count)
        if scales is None:
            out[tokens] = _attend(q[tokens], k, v, window, scale, cap)
        else:
            wide = _attend(q[tokens].float(), k.float(), v.float() * scales[1, :, None], window, scale, cap)
            out[tokens] = wide.to(out.dtype)
        first += count


def quantized(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Fp32 to the nearest that a cache of this type can store, of two as near ones the even one; NaN stays NaN where
    the type has one."""
    if dtype == torch.int8:
        return x.round().clamp_(-LARGEST[dtype], LARGEST[dtype]).nan_to_num_(0).to(dtype)
    most = LARGEST[dtype]
    return x.clamp(-most, most).to(dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float, cap: float | None) -> Tensor:
    """A row's last tokens q [n, heads, d] over k and v [length, kv_heads, d] → [n, heads, d]."""
    (n, heads, d), (length, kv_heads, _) = q.shape, k.shape
    grouped = q.view(n, kv_heads, heads // kv_heads, d).permute(1, 2, 0, 3)  # [kv_heads, group, n, d]
    shape = (kv_heads, heads // kv_heads, length, d)
    k, v = k.transpose(0, 1).unsqueeze(1).expand(shape), v.transpose(0, 1).unsqueeze(1).expand(shape)
    hidden = None
    if n > 1 and (n < length or cap is not None or (window is not None and window < length)):
        hidden = torch.ones(n, length, dtype=torch.bool).triu_(length - n + 1)
        if window is not None:
            hidden |= torch.ones(n, length, dtype=torch.bool).tril_(length - n - window)
    if cap is None:
        mask = None if hidden is None else ~hidden
        o = F.scaled_dot_product_attention(grouped, k, v, mask, is_causal=n > 1 and hidden is None, scale=scale)
    else:
        scores = (grouped @ k.transpose(-1, -2)).float().mul_(scale)
        soft_cap(scores, cap)
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        o = scores.softmax(-1).to(v.dtype) @ v
    return o.permute(2, 0, 1, 3).reshape(n, heads, d)
