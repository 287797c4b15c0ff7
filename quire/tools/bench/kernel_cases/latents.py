"""Cases of attention over latents: bf16, a latent of 512 and 64 rotated elements, blocks of 16 tokens that lie
anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.kernels.reference import paged_attention
from quire.compute.kernels.reference.attention_inputs import Mask, PagedRows, QueryTiles
from quire.tools.bench.kernel_cases import ITEM, Arguments, KernelCase, normal, on

_BLOCK_SIZE, _RANK, _ROTATED = 16, 512, 64
_WIDTH, _SCALE = _RANK + _ROTATED, 0.1


def _cache(rows: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A cache and a block table for contexts of this length; block 0 belongs to no context."""
    each = -(-length // _BLOCK_SIZE)
    latents = normal(device, 1 + rows * each, _BLOCK_SIZE, _WIDTH)
    return latents, 1 + torch.randperm(rows * each, device=device).view(rows, each)


def _decode(rows: int, length: int, heads: int) -> KernelCase:
    """Decode attention: each row's token sees `length` tokens with itself."""

    def make(device: torch.device) -> Arguments:
        from quire.compute.kernels.triton.attention import latents as triton_latents
        from quire.compute.kernels.triton.attention.decode_split_kv import MIN_SPLIT_TILES, kv_splits_for

        latents, table = _cache(rows, length, device)
        q, at_once = normal(device, rows, heads, _WIDTH), triton_latents.splits_at_once(heads, device)
        room = kv_splits_for(rows, at_once)
        splits = torch.zeros((room, paged_attention.KV_SPLIT_COLUMNS), dtype=torch.int32)
        ones = torch.ones(rows, dtype=torch.int64)
        plan = PagedRows(table.cpu(), torch.arange(rows), (length - 1) * ones, ones)
        tile = triton_latents.keys_of_tile(ITEM, device)
        paged_attention.plan_kv_splits(plan, None, Mask(), splits, tile, at_once, MIN_SPLIT_TILES)
        tiles = triton_latents.tiles_of_heads(heads)
        padded = tiles * triton_latents.HEADS_OF_TILE
        partials = paged_attention.new_decode_partials(room, padded, tiles, _RANK, device)
        return (q, latents, _ROTATED, table, splits.to(device), partials, _SCALE, torch.empty_like(q)), {}

    moved = rows * (length * _WIDTH + heads * (_WIDTH + _RANK)) * ITEM
    flops = 2 * rows * length * heads * (_WIDTH + _RANK)
    return KernelCase("decode_latents", f"{rows} × {length:,}, {heads} heads", make, moved, flops)


def _prefill(rows: int, tokens: int, before: int, heads: int) -> KernelCase:
    """Prefill attention: each row has `tokens` tokens in the step and `before` ones before it."""

    def make(device: torch.device) -> Arguments:
        from quire.compute.kernels.triton.attention.latents import queries_of_tile

        latents, table = _cache(rows, before + tokens, device)
        q, queries = normal(device, rows * tokens, heads, _WIDTH), queries_of_tile(ITEM, device)
        offsets, row = torch.arange(0, tokens, queries).flip(0), torch.arange(rows)
        tiles = QueryTiles(row.repeat(len(offsets)), offsets.repeat_interleave(rows), tokens * row)
        step = PagedRows(table, row, torch.full((rows,), before), torch.full((rows,), tokens))
        return on(device, q, latents, _ROTATED, step, tiles, queries, _SCALE, torch.empty_like(q))

    moved = rows * ((before + tokens) * _WIDTH + tokens * heads * (_WIDTH + _RANK)) * ITEM
    seen = rows * tokens * (before + (tokens + 1) // 2)  # pairs of a query and an entry
    name = f"{rows} × {tokens:,}{f' after {before:,}' if before else ''}, {heads} heads"
    return KernelCase("prefill_latents", name, make, moved, 2 * seen * heads * (_WIDTH + _RANK))


def _products(tokens: int, heads: int, k: int, n: int) -> KernelCase:
    """Each head's row times the head's own weight, into a part of a wider tensor."""

    def make(device: torch.device) -> Arguments:
        x, weight = normal(device, tokens, heads, k + _ROTATED)[..., :k], normal(device, heads, k, n)
        return (x, weight, normal(device, tokens, heads + 1, n + _ROTATED)[:, :heads, _ROTATED:]), {}

    moved = (heads * k * n + tokens * heads * (k + n)) * ITEM
    return KernelCase("head_products", f"{tokens}, {heads} heads, {k} → {n}", make, moved, 2 * tokens * heads * k * n)


def _inputs(tokens: int, heads: int) -> KernelCase:
    """The parts of queries and entries that no head's weight is multiplied with."""

    def make(device: torch.device) -> Arguments:
        q, latent = normal(device, tokens, heads, 128 + _ROTATED), normal(device, tokens, _WIDTH)
        return (q, latent, normal(device, _RANK), 1e-6, normal(device, tokens, heads + 1, _WIDTH)), {}

    moved = tokens * 2 * (heads * _ROTATED + _WIDTH) * ITEM
    return KernelCase("latent_inputs", f"{tokens}, {heads} heads", make, moved, 0)


CASES = (
    *(_decode(rows, length, 16) for rows, length in ((1, 4_096), (32, 4_096), (128, 8_192))),
    *(_decode(rows, length, 128) for rows, length in ((1, 4_096), (128, 8_192))),
    *(_prefill(rows, tokens, before, 16) for rows, tokens, before in ((1, 512, 0), (1, 2_048, 0), (1, 50, 2_000))),
    _prefill(1, 2_048, 0, 128),
    *(_products(tokens, 16, *widths) for tokens in (1, 32, 128) for widths in ((128, _RANK), (_RANK, 128))),
    *(_inputs(tokens, 16) for tokens in (1, 128, 8_192)),
)
SMALL_CASES = (_decode(2, 40, 20), _prefill(1, 9, 5, 20), _products(3, 5, 24, 40), _inputs(3, 5))
