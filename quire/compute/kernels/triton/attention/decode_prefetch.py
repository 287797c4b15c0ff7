"""Prefetches tiles for decode_large_batch.py, through a split and on into the next one.

The kernel's loop carries a tuple that says what to read next: a unit, the position in its split, the ids of the tile's
blocks, the split, and the next split.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from quire.compute.kernels.triton.attention.masks import WINDOW, tile_mask

ask_for = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # names before Triton 3.9


@gluon.jit
def load_split(lines, unit, KV_HEADS: gl.constexpr, COLUMNS: gl.constexpr, TILE: gl.constexpr):
    """Return a unit's split: token, slot, first position, end, the first position that is seen, the row's first split
    and its number of splits.

    The number is 0 where there is no split; the other entries are then undefined. A window may begin behind the split's
    first tiles: a tile of which nothing is seen has no highest score.
    """
    splits, units, _ = lines
    own = splits + gl.minimum(unit, units - 1) // KV_HEADS * COLUMNS  # all of it is asked for at once: volatile
    token, slot = gl.load(own, volatile=True), gl.load(own + 1, volatile=True)
    begin, end = gl.load(own + 2, volatile=True), gl.load(own + 3, volatile=True)
    seen_from, first = gl.load(own + 4, volatile=True), gl.load(own + 5, volatile=True)
    count = gl.where(unit < units, gl.load(own + 6, volatile=True), 0)
    there = count > 0
    begin = gl.where(there, gl.maximum(begin, seen_from // TILE * TILE), 0)
    token, slot = gl.where(there, token, 0), gl.where(there, slot, 0)
    end, seen_from = gl.where(there, end, 1), gl.where(there, seen_from, 0)
    return token, slot, begin, end, seen_from, first, count


@gluon.jit
def first_read(lines, unit, line, tables, shape: gl.constexpr, COLUMNS: gl.constexpr):
    """Return what to read first: a unit, the position in its split, the ids of the tile's blocks, the split, and the
    next."""
    KV_HEADS: gl.constexpr = shape[0]
    TILE: gl.constexpr = shape[3]
    block_table, block_table_stride = tables
    _, _, programs = lines
    _, slot, begin, end, _, _, _ = line
    following = load_split(lines, unit + programs, KV_HEADS, COLUMNS, TILE)
    blocks = block_table + slot.to(gl.int64) * block_table_stride
    return unit, begin, _block_ids(blocks, begin, end, shape), blocks, line, following


@gluon.jit
def prefetch_tile(ahead, lines, tables, caches, into, shape: gl.constexpr, COLUMNS: gl.constexpr):
    """Request the next tile, if there is one, and return what to read after it."""
    KV_HEADS: gl.constexpr = shape[0]
    TILE: gl.constexpr = shape[3]
    block_table, block_table_stride = tables
    _, _, programs = lines
    unit, at, ids, blocks, line, following = ahead
    _, slot, _, end, seen_from, _, count = line
    if count > 0:
        _copy_tile_async(caches, ids, at, seen_from, end, unit % KV_HEADS, into, shape)
        at += TILE
        if at >= end:
            unit += programs
            line = following
            _, slot, at, end, _, _, _ = line
            blocks = block_table + slot.to(gl.int64) * block_table_stride
            following = load_split(lines, unit + programs, KV_HEADS, COLUMNS, TILE)
        ids = _block_ids(blocks, at, end, shape)
    async_copy.commit_group()
    return unit, at, ids, blocks, line, following


@gluon.jit
def _block_ids(blocks, at, end, shape: gl.constexpr):
    """Return four block ids of the tile; where the split ends sooner, the last id is repeated."""
    BLOCK_SIZE: gl.constexpr = shape[2]
    NUMBER: gl.constexpr = shape[3] // BLOCK_SIZE
    number, last = at // BLOCK_SIZE, (end - 1) // BLOCK_SIZE
    id_0 = gl.load(blocks + gl.minimum(number, last))
    id_1, id_2, id_3 = id_0, id_0, id_0
    if NUMBER > 1:
        id_1 = gl.load(blocks + gl.minimum(number + 1, last))
    if NUMBER > 2:
        id_2 = gl.load(blocks + gl.minimum(number + 2, last))
        id_3 = gl.load(blocks + gl.minimum(number + 3, last))
    return id_0, id_1, id_2, id_3


@gluon.jit
def _copy_tile_async(caches, ids, at, seen_from, end, kv_head, into, shape: gl.constexpr):
    """Request a tile of keys and values, 16 bytes for each thread at a time; positions that are not seen become 0,
    unread."""
    keys, values, k, v = caches
    KV_HEADS: gl.constexpr = shape[0]
    D: gl.constexpr = shape[1]  # in words of 16 bits
    BLOCK_SIZE: gl.constexpr = shape[2]
    TILE: gl.constexpr = shape[3]
    ROWS: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < TILE else TILE
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [1, 1], [1, 0])
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, layout)), gl.arange(0, D, gl.SliceLayout(0, layout))
    offset = row[:, None] * (KV_HEADS * D) + column[None, :]
    inside = at % BLOCK_SIZE * (KV_HEADS * D) + kv_head * D
    whole = (at >= seen_from) & (at + TILE <= end)
    for number in gl.static_range(TILE // ROWS):
        base = ids[number] * (BLOCK_SIZE * KV_HEADS * D) + inside
        base = gl.multiple_of(base, min(D, 64))  # which Triton does not see in all cases
        k_rows = k.index(into).slice(number * ROWS, ROWS)
        v_rows = v.index(into).slice(number * ROWS, ROWS)
        if whole:
            ask_for(k_rows, keys + base + offset)
            ask_for(v_rows, values + base + offset)
        else:
            position = at + number * ROWS + row
            seen = tile_mask(position, seen_from, end, WINDOW)[:, None]
            ask_for(k_rows, keys + base + offset, mask=seen)
            ask_for(v_rows, values + base + offset, mask=seen)
