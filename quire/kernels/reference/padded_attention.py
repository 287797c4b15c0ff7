"""Attention over a paged KV cache: writing keys and values, and reading them back through block tables.

Keys and values are [blocks, block_size, kv_heads, d]. Query heads come in `heads / kv_heads` per KV head, adjacent.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.reference.activation import soft_cap
from quire.kernels.reference.norm import rms_norm
from quire.kernels.reference.rotary import rotary


def qk_norm_rope_and_cache(
    qkv: Tensor,
    norm: Tensor | None,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    q: Tensor,
) -> None:
    """Norm and rotate queries and keys; store each token's key and value at its place.

    Args:
        qkv: [tokens, heads + 2 · kv_heads, d], as projected; not changed.
        norm: [heads + kv_heads, d], the weight of a norm of each head of queries and keys (see rms_norm); None: none.
        eps: Of that norm.
        cos, sin: [tokens, r/2] (see rotary); None: nothing is rotated.
        keys, values: [blocks, block_size, kv_heads, d], written in place.
        slot_mapping: [tokens] int64, block · block_size + offset.
        q: [tokens, heads, d], the queries that come out.
    """
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
    q.copy_(qk[:, :heads])
    keys.flatten(0, 1).index_copy_(0, slot_mapping, qk[:, heads:])
    values.flatten(0, 1).index_copy_(0, slot_mapping, v)


def decode_attention_padded(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    length: int,
    mask: Tensor | None,
    out: Tensor,
    scale: float,
    cap: float | None = None,
) -> None:
    """One query token a row, each over its own blocks, all rows at once, padded to the longest.

    A KV head's query heads stand as its queries, so keys are never repeated.

    Args:
        q: [rows, heads, d].
        blocks: [rows, n] int64, block ids of each row from the first that it sees; n · block_size ≥ length.
        length: Tokens of the longest row in its blocks.
        mask: [rows, 1, 1, length], added to the scores (-inf for what a row does not see), or None if all see all.
        out: [rows, heads, d].
        scale: Of the products.
        cap: A bound c of the scores, c · tanh(score / c), if there is one.
    """
    rows, heads, d = q.shape
    kv_heads = keys.shape[2]
    k = keys.index_select(0, blocks.flatten()).view(rows, -1, kv_heads, d)[:, :length]
    v = values.index_select(0, blocks.flatten()).view(rows, -1, kv_heads, d)[:, :length]
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, d)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if cap is None:
        o = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    else:
        o = _capped_attention(grouped, k, v, mask, scale, cap)
    out.copy_(o.reshape(rows, heads, d))


def prefill_attention_row(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    mask: Tensor | None,
    out: Tensor,
    scale: float,
    cap: float | None = None,
) -> None:
    """Several query tokens of one row over everything before them and themselves.

    Args:
        q: [n, heads, d]: the row's last n positions.
        blocks: [m] int64, the row's block ids in order, from the first that is seen.
        mask: [n, length], added to the scores: -inf where a query does not see a key; None if n is the whole length,
            and a token sees all before it.
        out: [n, heads, d].
        scale, cap: See decode_attention_padded.
    """
    n, heads, d = q.shape
    kv_heads = keys.shape[2]
    length = n if mask is None else mask.shape[1]
    k = keys.index_select(0, blocks).flatten(0, 1)[:length]  # [length, kv_heads, d]
    v = values.index_select(0, blocks).flatten(0, 1)[:length]
    grouped = q.view(n, kv_heads, heads // kv_heads, d).permute(1, 2, 0, 3)  # [kv_heads, group, n, d]
    shape = (kv_heads, heads // kv_heads, length, d)
    k, v = k.transpose(0, 1).unsqueeze(1).expand(shape), v.transpose(0, 1).unsqueeze(1).expand(shape)
    if cap is None:
        o = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    else:
        causal = mask
        if causal is None:
            causal = torch.full((n, n), float("-inf"), dtype=q.dtype, device=q.device).triu_(1)
        o = _capped_attention(grouped, k, v, causal, scale, cap)
    out.copy_(o.permute(2, 0, 1, 3).reshape(n, heads, d))


def _capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float) -> Tensor:
    """softmax(cap · tanh(q kᵀ · scale / cap) + mask) v: all [..., n, d], the softmax in fp32."""
    scores = (q @ k.transpose(-1, -2)).float().mul_(scale)
    soft_cap(scores, cap)
    if mask is not None:
        scores.add_(mask)
    return scores.softmax(-1).to(v.dtype) @ v
