"""Attention over latents, which are keys and values at once (MLA; DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

A cached entry begins with its rotated part, which only keys have; behind it is the latent. Queries have what makes keys
of latents multiplied in.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.compute.kernels.reference.attention_inputs import Mask, PagedKV, PagedRows, QueryTiles, Scores
from quire.compute.kernels.reference.norm import rms_norm
from quire.compute.kernels.reference.paged_attention import DecodePartials, decode_attention, prefill_attention


def decode_latents(
    q: Tensor, latents: Tensor, rotated: int, block_table: Tensor, splits: Tensor, partials: DecodePartials,
    scale: float, out: Tensor,
) -> None:  # fmt: skip
    """Compute the attention of one query token for each row, from splits of the entries that the row sees.

    Args:
        q: [tokens, heads, d].
        latents: [blocks, block_size, d], with the step's own entries.
        rotated: Width of the rotated part.
        block_table: [slots, n] int64; entries for blocks that no row sees are not used.
        splits: The result of `plan_kv_splits`.
        partials: Room for at least as many splits; the reference needs none.
        scale: The factor of products.
        out: [tokens, heads, d]; rows of the splits' tokens are written, without their rotated part.
    """
    whole = torch.empty_like(out)
    decode_attention(q, _as_kv(latents), block_table, splits, partials, Scores(scale), whole)
    for token, *_, count, _ in splits.tolist():
        if count:
            out[token, :, rotated:] = whole[token, :, rotated:]


def prefill_latents(
    q: Tensor, latents: Tensor, rotated: int, rows: PagedRows, tiles: QueryTiles, queries: int, scale: float,
    out: Tensor,
) -> None:  # fmt: skip
    """Compute attention for tiles of several query tokens of one row each.

    Args:
        q, latents, rotated, scale: As in `decode_latents`.
        rows, tiles: The step's rows, and their tiles.
        queries: Tokens in a tile; a row's last tile may have fewer.
        out: [tokens, heads, d]; rows of the tiles' tokens are written, without their rotated part.
    """
    whole = torch.empty_like(out)
    prefill_attention(q, _as_kv(latents), rows, tiles, queries, Mask(), Scores(scale), whole)
    for row, offset in zip(tiles.rows.tolist(), tiles.offsets.tolist(), strict=True):
        first = int(tiles.first_tokens[row]) + offset
        own = slice(first, first + max(0, min(queries, int(rows.counts[row]) - offset)))
        out[own, :, rotated:] = whole[own, :, rotated:]


def head_products(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Multiply each head's row with the head's own weight.

    Args:
        x: [tokens, heads, k]; may be a part of a wider tensor.
        weight: [heads, k, n].
        out: [tokens, heads, n]; may be a part of a wider tensor.
    """
    out.copy_(torch.bmm(x.transpose(0, 1), weight).transpose(0, 1))


def latent_inputs(
    q: Tensor, latent: Tensor, weight: Tensor, eps: float, qk: Tensor, norm: Callable[..., None] = rms_norm
) -> None:
    """Place the parts of a step's queries and entries that no head's weight is multiplied with.

    Args:
        q: [tokens, heads, nope + rotated].
        latent: [tokens, rank + rotated]: latents, which are normed, and the rotated part of keys.
        weight: [rank], the norm's.
        eps: Added to the mean square.
        qk: [tokens, heads + 1, rotated + rank]: queries, and entries behind them. Latents of queries are not written.
        norm: The op `rms_norm`.
    """
    rank, heads = weight.shape[0], q.shape[1]
    rotated = qk.shape[2] - rank
    qk[:, :heads, :rotated] = q[..., q.shape[2] - rotated :]
    qk[:, heads, :rotated] = latent[:, rank:]
    normed = latent.new_empty((len(latent), rank))
    norm(latent[:, :rank].contiguous(), weight, eps, normed)
    qk[:, heads, rotated:] = normed


def _as_kv(latents: Tensor) -> PagedKV:
    return PagedKV(latents.unsqueeze(2), latents.unsqueeze(2))
