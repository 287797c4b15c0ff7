"""Attention over a paged KV cache: writing keys and values, and reading them back through block tables.

Keys and values are [blocks, block_size, kv_heads, d]. Query heads come in `heads / kv_heads` per KV head, adjacent.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def kv_write(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, places: Tensor) -> None:
    """Store each token's key and value at its place.

    Args:
        k, v: [tokens, kv_heads, d].
        keys, values: [blocks, block_size, kv_heads, d], written in place.
        places: [tokens] int64, block · block_size + offset.
    """
    keys.flatten(0, 1).index_copy_(0, places, k)
    values.flatten(0, 1).index_copy_(0, places, v)


def attend_tokens(
    q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, length: int, mask: Tensor | None, out: Tensor
) -> None:
    """One query token a row, each over its own blocks, all rows at once, padded to the longest.

    A KV head's query heads stand as its queries, so keys are never repeated.

    Args:
        q: [rows, heads, d].
        blocks: [rows, n] int64, block ids of each row; n · block_size ≥ length.
        length: The longest row's.
        mask: [rows, 1, 1, length], added to the scores (-inf beyond a row's own length), or None if all are equal.
        out: [rows, heads, d].
    """
    rows, heads, d = q.shape
    kv_heads = keys.shape[2]
    k = keys.index_select(0, blocks.flatten()).view(rows, -1, kv_heads, d)[:, :length]
    v = values.index_select(0, blocks.flatten()).view(rows, -1, kv_heads, d)[:, :length]
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, d)
    o = F.scaled_dot_product_attention(grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    out.copy_(o.reshape(rows, heads, d))


def attend_chunk(q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, mask: Tensor | None, out: Tensor) -> None:
    """Several query tokens of one row over everything before them and themselves.

    Args:
        q: [n, heads, d]: the row's last n positions.
        blocks: [m] int64, the row's block ids in order.
        mask: [n, length], added to the scores: -inf where a key comes after its query; None if n is the whole length.
        out: [n, heads, d].
    """
    n, heads, d = q.shape
    kv_heads = keys.shape[2]
    length = n if mask is None else mask.shape[1]
    k = keys.index_select(0, blocks).flatten(0, 1)[:length]  # [length, kv_heads, d]
    v = values.index_select(0, blocks).flatten(0, 1)[:length]
    grouped = q.view(n, kv_heads, heads // kv_heads, d).permute(1, 2, 0, 3)  # [kv_heads, group, n, d]
    shape = (kv_heads, heads // kv_heads, length, d)
    k, v = k.transpose(0, 1).unsqueeze(1).expand(shape), v.transpose(0, 1).unsqueeze(1).expand(shape)
    o = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, is_causal=mask is None)
    out.copy_(o.permute(2, 0, 1, 3).reshape(n, heads, d))
