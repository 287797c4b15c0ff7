"""Attention of a step's rows over the paged cache, divided among a GPU's programs.

The keys of decode rows (of one token) are split, longer rows are cut into tiles of queries. Lengths are known to the
device only, and stay there. Keys and values are [blocks, block_size, kv_heads, d]; a block table has a line
of block ids for each slot. Query heads come in `heads / kv_heads` per KV head, adjacent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.compute.kernels.reference.activation import soft_cap

KV_SPLIT_COLUMNS = 8
SPLIT_OVERHEAD_TILES = 3
"""What a split takes beside its own tiles, as many tiles: a program's start and end. Measured on an H200."""


@dataclass(frozen=True)
class DecodePartials:
    """What splits of decode rows leave until they are merged; the reference needs none.

    Attributes:
        outputs: [splits, heads, d] fp32, sums of values.
        sums: [splits, heads, 2] fp32, each split's highest score and sum of weights.
        arrived: [splits, kv_heads] int32, how many splits of a row have ended; all zero between calls.
    """

    outputs: Tensor
    sums: Tensor
    arrived: Tensor


def new_decode_partials(splits: int, heads: int, kv_heads: int, d: int, device: torch.device) -> DecodePartials:
    """Allocate partial results for so many splits."""
    return DecodePartials(
        torch.empty((splits, heads, d), device=device),
        torch.empty((splits, heads, 2), device=device),
        torch.zeros((splits, kv_heads), dtype=torch.int32, device=device),
    )


@dataclass(frozen=True)
class PrefillPartials:
    """What splits of prefill tiles leave until they are merged, for each of their queries.

    Attributes:
        outputs: [queries, heads, d] fp32, means of values.
        sums: [queries, heads] fp32, logarithms, to the base of 2, of sums of weights.
    """

    outputs: Tensor
    sums: Tensor


def new_prefill_partials(queries: int, heads: int, d: int, device: torch.device) -> PrefillPartials:
    """Allocate partial results for so many query tokens."""
    return PrefillPartials(
        torch.empty((queries, heads, d), device=device), torch.empty((queries, heads), device=device)
    )


def compute_slot_mapping(
    block_table: Tensor, slots: Tensor, positions: Tensor, block_size: int, slot_mapping: Tensor
) -> None:
    """Compute the slot of the KV cache that each token's key and value go to.

    Args:
        block_table: [slots, n] int64.
        slots, positions: [tokens] int64.
        block_size: Tokens a block.
        slot_mapping: [tokens] int64, what comes out: block · block_size + offset.
    """
    slot_mapping.copy_(block_table[slots, positions // block_size] * block_size + positions % block_size)


def plan_kv_splits(
    starts: Tensor,
    slots: Tensor,
    decode_rows: Tensor | None,
    tokens: Tensor | None,
    window: int | None,
    tile: int,
    splits: Tensor,
    at_once: int,
    min_tiles: int = 1,
) -> None:
    """Split the keys of decode rows into equal lengths, as far as tiles allow: into as many splits as there is room
    for, or into no more than there are rows or than run at once, whichever is expected to take less time.

    Args:
        starts: [rows] int64, tokens before the step; a row sees them and its own.
        slots: [rows] int64.
        decode_rows: [n] int64, the rows that have one token; None: all. Entries below 0 are padding.
        tokens: [n] int64, the place of each one's token in the batch; None: as its row.
        window: How many tokens a token sees, itself included; None: all.
        tile: Splits begin at multiples of so many positions.
        splits: [room, KV_SPLIT_COLUMNS] int32, room ≥ n, out. Of each split: token, slot, first position, end,
            the first position that the row sees, the row's first split, its number of splits. A row's splits stand
            together, in order. The number is 0 for those that remain.
        at_once: Splits that the device takes at the same time.
        min_tiles: Tiles of a split, where its row has so many.
    """
    rows = range(len(slots)) if decode_rows is None else decode_rows.tolist()
    of_row = [(row if tokens is None else int(tokens[i]), row) for i, row in enumerate(rows) if row >= 0]
    spans = []
    for _, row in of_row:
        length = int(starts[row]) + 1
        seen_from = 0 if window is None else max(0, length - window)
        spans.append((seen_from, seen_from // tile * tile, length))
    tiles = [-(-(length - base) // tile) for _, base, length in spans]
    choices, few = (
        range(min_tiles, max([*tiles, min_tiles]) + 1),
        max(at_once, len(slots) if decode_rows is None else len(decode_rows)),
    )
    rooms = min(few, len(splits)), len(splits)
    found = [next(most for most in choices if sum(-(-each // most) for each in tiles) <= room) for room in rooms]
    longest = min(found, key=lambda most: _cost(tiles, most, at_once))
    splits.zero_()
    first = 0
    for (token, row), (seen_from, base, length), n in zip(of_row, spans, tiles, strict=True):
        each = -(-n // -(-n // longest)) * tile
        begins = range(base, length, each)
        for number, begin in enumerate(begins):
            end = min(begin + each, length)
            split = (token, int(slots[row]), begin, end, seen_from, first, len(begins), 0)
            splits[first + number] = torch.tensor(split, dtype=torch.int32)
        first += len(begins)


def _cost(tiles: list[int], most: int, at_once: int) -> int:
    """Return the cost of splits of `most` tiles, in tiles · 2 · at_once.

    A round takes as long as its longest split; if there are several rounds, the last one leaves half of the device idle
    for half as long.

    Args:
        tiles: The tiles of each row.
        most: The most tiles of a split.
        at_once: How many splits the device computes at the same time.
    """
    splits = sum(-(-each // most) for each in tiles)
    if splits <= at_once:
        return 2 * at_once * (most + SPLIT_OVERHEAD_TILES)
    return 2 * (sum(tiles) + SPLIT_OVERHEAD_TILES * splits) + most * at_once


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    splits: Tensor,
    partials: DecodePartials,
    out: Tensor,
    scale: float,
    cap: float | None = None,
    rows: int | None = None,
    scales: Tensor | None = None,
) -> None:
    """Compute the attention of one query token for each row, from the splits of the keys that the row sees.

    Args:
        q: [tokens, heads, d].
        keys, values: [blocks, block size, kv_heads, d]. Elements that no row sees may be anything, even NaN.
        block_table: [slots, n] int64; entries for blocks that no row sees are not used.
        splits: See plan_kv_splits.
        partials: Room for at least as many splits.
        out: [tokens, heads, d]; rows of the splits' tokens are written.
        scale: What q · k is multiplied by.
        cap: A bound c for the scores, which become c · tanh(score / c); None: no bound.
        rows: How many rows the splits are of, at most; None: as many as there are tokens. It decides what is fastest,
            as 0 does where other kernels run beside this one.
        scales: [2, kv_heads] fp32 of a quantized cache: what values are multiplied with stands behind what queries were
            multiplied with, see rowwise_attention.py.
    """
    for number, (token, slot, _, _, seen_from, first, count, _) in enumerate(splits.tolist()):
        if number == first and count:
            end = int(splits[first + count - 1, 3])
            k, v = (_context(x, block_table[slot], seen_from, end) for x in (keys, values))
            v = _scaled(v, scales)
            out[token] = _attend(q[token : token + 1], k, v, None, scale, cap)[0]


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    tile_rows: Tensor,
    tile_offsets: Tensor,
    starts: Tensor,
    counts: Tensor,
    first_tokens: Tensor,
    slots: Tensor,
    window: int | None,
    queries: int,
    out: Tensor,
    scale: float,
    cap: float | None = None,
    scales: Tensor | None = None,
) -> None:
    """Compute causal attention for tiles, each of several query tokens of one row.

    A token sees itself and the tokens before it.

    Args:
        q: [tokens, heads, d].
        keys, values, block_table: See decode_attention. The step's own keys and values are among them.
        tile_rows, tile_offsets: [n] int64: a row, and which of its tokens in this step is the tile's first. A tile of
            a row without tokens, from 0, is padding.
        starts, counts: [rows] int64: tokens before the step and in it.
        first_tokens, slots: [rows] int64: the place of the row's first token in the batch, and its line in the table.
        window: How many tokens a token sees, itself included; None: all before it.
        queries: Tokens a tile; a row's last tile may have fewer.
        out: [tokens, heads, d]; rows of the tiles' tokens are written.
        scale, cap, scales: See decode_attention.
    """
    for row, offset in zip(tile_rows.tolist(), tile_offsets.tolist(), strict=True):
        start, begin = int(starts[row]), int(first_tokens[row]) + offset
        n = min(queries, int(counts[row]) - offset)
        position = start + offset + torch.arange(n, device=q.device)
        seen_from, end = 0 if window is None else max(0, start + offset + 1 - window), start + offset + n
        k, v = (_context(x, block_table[int(slots[row])], seen_from, end) for x in (keys, values))
        v = _scaled(v, scales)
        other = torch.arange(seen_from, end, device=q.device)
        hidden = other > position[:, None]
        if window is not None:
            hidden |= other <= position[:, None] - window
        out[begin : begin + n] = _attend(q[begin : begin + n], k, v, hidden, scale, cap)


def prefill_attention_split_kv(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    tile_rows: Tensor,
    tile_offsets: Tensor,
    split_numbers: Tensor,
    split_counts: Tensor,
    starts: Tensor,
    counts: Tensor,
    first_tokens: Tensor,
    slots: Tensor,
    window: int | None,
    queries: int,
    partials: PrefillPartials,
    out: Tensor,
    scale: float,
    cap: float | None = None,
    scales: Tensor | None = None,
) -> None:
    """Compute causal attention as `prefill_attention` does, with each tile's keys split among several programs.

    Args:
        q, keys, values, block_table: See prefill_attention.
        tile_rows, tile_offsets: [n] int64, each tile's as often as it has splits. These stand together, in order.
        split_numbers, split_counts: [n] int64: which of a tile's splits it is, from 0, and how many they are at most:
            as many as the tile's keys are long enough for. Padding has none.
        starts, counts, first_tokens, slots, window, queries: See prefill_attention.
        partials: Memory for `queries` of each split, up to the last split of the last tile.
        out, scale, cap, scales: See prefill_attention.
    """
    own = split_numbers == 0
    tiles = (tile_rows[own], tile_offsets[own])
    prefill_attention(
        q,
        keys,
        values,
        block_table,
        *tiles,
        starts,
        counts,
        first_tokens,
        slots,
        window,
        queries,
        out,
        scale,
        cap,
        scales,
    )


def gather_kv(
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    slots: Tensor,
    chunk_rows: Tensor,
    chunk_offsets: Tensor,
    chunk_counts: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Copy rows' keys and values from the paged cache into contiguous memory, chunk by chunk.

    Args:
        keys, values, block_table: See decode_attention.
        slots: [rows] int64, each row's line in the block table.
        chunk_rows, chunk_offsets, chunk_counts: [chunks] int64: a row, the chunk's first position in its context, and
            how many of its positions exist.
        k, v: [chunks · n, kv_heads, d], what comes out: n positions of each chunk, 0 for those that do not exist.
        scales: See decode_attention; values come out multiplied.
    """
    each = len(k) // len(chunk_rows)
    k.zero_()
    v.zero_()
    columns = (chunk_rows.tolist(), chunk_offsets.tolist(), chunk_counts.tolist())
    for chunk, (row, begin, count) in enumerate(zip(*columns, strict=True)):
        context = [_context(cache, block_table[int(slots[row])], begin, begin + count) for cache in (keys, values)]
        own = slice(chunk * each, chunk * each + count)
        k[own], v[own] = context[0].to(k.dtype), _scaled(context[1], scales).to(v.dtype)


def prefill_attention_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tile_tokens: Tensor,
    tile_queries: Tensor,
    tile_contexts: Tensor,
    tile_bases: Tensor,
    out: Tensor,
    scale: float,
    cap: float | None = None,
) -> None:
    """Tiles of several query tokens of one row, causally, over contexts that are contiguous.

    Args:
        q: [tokens, heads, d].
        k, v: [n, kv_heads, d], see gather_kv: each row's context, and zeros up to the next one's beginning.
        tile_tokens: [tiles] int64, the place of a tile's first token in the batch.
        tile_queries: [tiles] int64, how many tokens it has.
        tile_contexts: [tiles] int64, positions of its context before the first of them.
        tile_bases: [tiles] int64, where its context begins in k and v.
        out: [tokens, heads, d]; rows of the tiles' tokens are written.
        scale, cap: See decode_attention.
    """
    columns = (tile_tokens, tile_queries, tile_contexts, tile_bases)
    for token, n, before, base in zip(*(column.tolist() for column in columns), strict=True):
        context = slice(base, base + before + n)
        hidden = torch.ones((n, before + n), dtype=torch.bool, device=q.device).triu_(before + 1)
        out[token : token + n] = _attend(q[token : token + n], k[context], v[context], hidden, scale, cap)


def _context(cache: Tensor, line: Tensor, begin: int, end: int) -> Tensor:
    """[end - begin, kv_heads, d] from the blocks of a table's line."""
    position = torch.arange(begin, end, device=cache.device)
    size = cache.shape[1]
    return cache[line[position // size], position % size]


def _scaled(v: Tensor, scales: Tensor | None) -> Tensor:
    """Values [length, kv_heads, d] as what they stand for."""
    return v if scales is None else v.float() * scales[1, :, None]


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float, cap: float | None) -> Tensor:
    """softmax(score(q kᵀ)) v in fp32: q [n, heads, d], k and v [length, kv_heads, d] → [n, heads, d]."""
    (n, heads, d), kv_heads = q.shape, k.shape[1]
    grouped = q.float().view(n, kv_heads, heads // kv_heads, d)
    products = torch.einsum("nhgd,khd->hgnk", grouped, k.float()) * scale
    if cap is not None:
        soft_cap(products, cap)
    if hidden is not None:
        products.masked_fill_(hidden, float("-inf"))
    return torch.einsum("hgnk,khd->nhgd", products.softmax(-1), v.float()).reshape(n, heads, d).to(q.dtype)
