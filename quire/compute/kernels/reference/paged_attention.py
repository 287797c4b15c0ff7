"""Attention of a step's rows over the paged cache, divided among a GPU's programs.

The keys of decode rows (of one token) are split; longer rows are cut into tiles of queries. Only the device knows the
lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.compute.kernels.reference.activation import add_slopes, soft_cap, softmax_with_sinks
from quire.compute.kernels.reference.attention_inputs import (
    DecodeRows,
    DenseTiles,
    GatherChunks,
    KVSplits,
    Mask,
    PagedKV,
    PagedRows,
    QueryTiles,
    Scores,
    tile_mask,
    visible_range,
)

KV_SPLIT_COLUMNS = 8
SPLIT_OVERHEAD_TILES = 3
"""The overhead of a split, a program's start and end, in tiles. Measured on an H200."""


@dataclass(frozen=True)
class DecodePartials:
    """The results of decode rows' splits until they are merged; the reference needs none.

    Attributes:
        outputs: [splits, heads, d] fp32, sums of values.
        sums: [splits, heads, 2] fp32, each split's highest score and sum of weights.
        arrived: [splits, kv_heads] int32, how many splits of a row have ended; all zero between calls.
    """

    outputs: Tensor
    sums: Tensor
    arrived: Tensor


def new_decode_partials(splits: int, heads: int, kv_heads: int, d: int, device: torch.device) -> DecodePartials:
    return DecodePartials(
        torch.empty((splits, heads, d), device=device),
        torch.empty((splits, heads, 2), device=device),
        torch.zeros((splits, kv_heads), dtype=torch.int32, device=device),
    )


@dataclass(frozen=True)
class PrefillPartials:
    """The results of prefill tiles' splits until they are merged, for each of their queries.

    Attributes:
        outputs: [queries, heads, d] fp32, means of values.
        sums: [queries, heads] fp32, logarithms, to the base of 2, of sums of weights.
    """

    outputs: Tensor
    sums: Tensor


def new_prefill_partials(queries: int, heads: int, d: int, device: torch.device) -> PrefillPartials:
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
        block_size: Tokens in a block.
        slot_mapping: [tokens] int64, out: block · block_size + offset.
    """
    slot_mapping.copy_(block_table[slots, positions // block_size] * block_size + positions % block_size)


def plan_kv_splits(
    rows: PagedRows,
    decode: DecodeRows | None,
    mask: Mask,
    splits: Tensor,
    tile: int,
    at_once: int,
    min_tiles: int = 1,
) -> None:
    """Split the keys of decode rows into equal lengths, as far as tiles allow.

    There are as many splits as there is room for, or no more than there are rows or than run at once, whichever is
    expected to take less time.

    Args:
        rows: The step's rows; only slots and starts are read.
        decode: The rows of one token; None: all rows, and row n has token n.
        mask: The mask of the group's layers.
        splits: [room, KV_SPLIT_COLUMNS] int32, room ≥ n, out. Of each split: token, slot, first position, end, the
            first position that the row sees, the row's first split, its number of splits. A row's splits are adjacent,
            in order. The number is 0 for unused splits.
        tile: Splits begin at multiples of this many positions.
        at_once: How many splits the device computes at the same time.
        min_tiles: The minimum tiles of a split, if its row has as many.
    """
    numbers = range(len(rows.slots)) if decode is None else decode.rows.tolist()
    tokens = numbers if decode is None else decode.tokens.tolist()
    of_row = [(token, row) for token, row in zip(tokens, numbers, strict=True) if row >= 0]
    spans = []
    for _, row in of_row:
        start = int(rows.starts[row])
        seen_from, length = visible_range(mask, start, start + 1, start + 1)
        spans.append((seen_from, seen_from // tile * tile, length))
    tiles = [-(-(length - base) // tile) for _, base, length in spans]
    choices = range(min_tiles, max([*tiles, min_tiles]) + 1)
    rooms = min(max(at_once, len(numbers)), len(splits)), len(splits)
    found = [next(most for most in choices if sum(-(-each // most) for each in tiles) <= room) for room in rooms]
    longest = min(found, key=lambda most: _cost(tiles, most, at_once))
    splits.zero_()
    first = 0
    for (token, row), (seen_from, base, length), n in zip(of_row, spans, tiles, strict=True):
        each = -(-n // -(-n // longest)) * tile
        begins = range(base, length, each)
        for number, begin in enumerate(begins):
            end = min(begin + each, length)
            split = (token, int(rows.slots[row]), begin, end, seen_from, first, len(begins), 0)
            splits[first + number] = torch.tensor(split, dtype=torch.int32)
        first += len(begins)


def _cost(tiles: list[int], most: int, at_once: int) -> int:
    """Return the cost of splits of at most `most` tiles, in tiles · 2 · at_once.

    A round takes as long as its longest split; if there are several rounds, the last one leaves half of the device idle
    for half as long. `tiles` are those of each row.
    """
    splits = sum(-(-each // most) for each in tiles)
    if splits <= at_once:
        return 2 * at_once * (most + SPLIT_OVERHEAD_TILES)
    return 2 * (sum(tiles) + SPLIT_OVERHEAD_TILES * splits) + most * at_once


def decode_attention(
    q: Tensor,
    kv: PagedKV,
    block_table: Tensor,
    splits: Tensor,
    partials: DecodePartials,
    scores: Scores,
    out: Tensor,
    rows: int | None = None,
) -> None:
    """Compute the attention of one query token for each row, from the splits of the keys that the row sees.

    Args:
        q: [tokens, heads, d].
        kv: The paged cache, with the step's own keys and values.
        block_table: [slots, n] int64; entries for blocks that no row sees are not used.
        splits: The result of `plan_kv_splits`.
        partials: Room for at least as many splits.
        scores: How the layer makes scores.
        out: [tokens, heads, d]; rows of the splits' tokens are written.
        rows: The maximum number of rows with splits; None: the number of tokens. It decides which kernel is fastest; 0
            says that other kernels run beside this one.
    """
    for number, (token, slot, _, _, seen_from, first, count, _) in enumerate(splits.tolist()):
        if number == first and count:
            end = int(splits[first + count - 1, 3])
            k, v = _context(kv, block_table[slot], seen_from, end)
            out[token] = _attend(q[token : token + 1], k, v, None, scores)[0]


def prefill_attention(
    q: Tensor,
    kv: PagedKV,
    rows: PagedRows,
    tiles: QueryTiles,
    queries: int,
    mask: Mask,
    scores: Scores,
    out: Tensor,
) -> None:
    """Compute attention for tiles of several query tokens of one row each.

    Args:
        q: [tokens, heads, d].
        kv: The paged cache, with the step's own keys and values.
        rows, tiles: The step's rows, and their tiles.
        queries: Tokens in a tile; a row's last tile may have fewer.
        mask, scores: The layer's.
        out: [tokens, heads, d]; rows of the tiles' tokens are written.
    """
    for row, offset in zip(tiles.rows.tolist(), tiles.offsets.tolist(), strict=True):
        first, begin = int(rows.starts[row]) + offset, int(tiles.first_tokens[row]) + offset
        n = min(queries, int(rows.counts[row]) - offset)
        seen_from, end = visible_range(mask, first, first + n, int(rows.starts[row] + rows.counts[row]))
        k, v = _context(kv, rows.block_table[int(rows.slots[row])], seen_from, end)
        positions = torch.arange(first, first + n, device=q.device)
        seen = tile_mask(mask, positions, torch.arange(seen_from, end, device=q.device))
        out[begin : begin + n] = _attend(q[begin : begin + n], k, v, seen, scores)


def prefill_attention_split_kv(
    q: Tensor,
    kv: PagedKV,
    rows: PagedRows,
    tiles: QueryTiles,
    splits: KVSplits,
    queries: int,
    partials: PrefillPartials,
    mask: Mask,
    scores: Scores,
    out: Tensor,
) -> None:
    """Compute attention as `prefill_attention` does, with each tile's keys split among several programs.

    Args:
        q, kv, rows, queries, mask, scores, out: As in `prefill_attention`.
        tiles: Each tile, repeated for each of its splits.
        splits: The split of its tile that each entry of `tiles` is. A tile that sees less may have fewer than stated.
        partials: Memory for `queries` of each split, up to the last split of the last tile.
    """
    first = splits.numbers == 0
    whole = QueryTiles(tiles.rows[first], tiles.offsets[first], tiles.first_tokens)
    prefill_attention(q, kv, rows, whole, queries, mask, scores, out)


def gather_kv(kv: PagedKV, block_table: Tensor, slots: Tensor, chunks: GatherChunks, k: Tensor, v: Tensor) -> None:
    """Copy rows' keys and values from the paged cache into contiguous memory, chunk by chunk.

    Args:
        kv: The paged cache.
        block_table: [slots, n] int64.
        slots: [rows] int64, each row's line in the block table.
        chunks: The chunks to copy.
        k, v: [chunks · n, kv_heads, d], out: n positions of each chunk, 0 for positions that do not exist. Values are
            multiplied by their scales.
    """
    each = len(k) // len(chunks.rows)
    k.zero_()
    v.zero_()
    columns = (column.tolist() for column in chunks)
    for chunk, (row, begin, count) in enumerate(zip(*columns, strict=True)):
        keys, values = _context(kv, block_table[int(slots[row])], begin, begin + count)
        own = slice(chunk * each, chunk * each + count)
        k[own], v[own] = keys.to(k.dtype), values.to(v.dtype)


def prefill_attention_dense(q: Tensor, k: Tensor, v: Tensor, tiles: DenseTiles, scores: Scores, out: Tensor) -> None:
    """Compute attention for tiles of several query tokens of one row, over contiguous contexts, without a window.

    Args:
        q: [tokens, heads, d].
        k, v: [n, kv_heads, d], from `gather_kv`: each row's context, and zeros up to the next context.
        tiles: The rows' tiles.
        scores: How the layer makes scores.
        out: [tokens, heads, d]; rows of the tiles' tokens are written.
    """
    for token, n, before, base in zip(*(column.tolist() for column in tiles), strict=True):
        context = slice(base, base + before + n)
        positions = torch.arange(before + n, device=q.device)
        seen = tile_mask(Mask(), positions[before:], positions)
        out[token : token + n] = _attend(q[token : token + n], k[context], v[context], seen, scores)


def _context(kv: PagedKV, line: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [end - begin, kv_heads, d] from the blocks of a table's line, values with their scales."""
    position = torch.arange(begin, end, device=kv.keys.device)
    size = kv.keys.shape[1]
    where = line[position // size], position % size
    k, v = kv.keys[where], kv.values[where]
    return k, v if kv.scales is None else v.float() * kv.scales[1, :, None]


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scores: Scores) -> Tensor:
    """Return softmax(score(q kᵀ)) v in fp32: q [n, heads, d], k and v [length, kv_heads, d] → [n, heads, d].

    The last key is the last query's.
    """
    (n, heads, d), (length, kv_heads, _) = q.shape, k.shape
    grouped = q.float().view(n, kv_heads, heads // kv_heads, d)
    products = torch.einsum("nhgd,khd->hgnk", grouped, k.float()) * scores.scale
    if scores.cap is not None:
        soft_cap(products, scores.cap)
    if scores.slopes is not None:
        keys = torch.arange(length, device=q.device)
        add_slopes(products, scores.slopes, keys[length - n :], keys)
    if seen is not None:
        products.masked_fill_(~seen, float("-inf"))
    weights = softmax_with_sinks(products, scores.sinks)
    return torch.einsum("hgnk,khd->nhgd", weights, v.float()).reshape(n, heads, d).to(q.dtype)
