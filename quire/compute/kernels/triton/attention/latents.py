"""Computes attention over latents (MLA), which are keys and values at once, in the paged cache.

All query heads share one entry of a token, so a program takes a tile of heads, reads each entry once, and multiplies
with it twice: rotated part and latent with queries, the latent with weights. In decoding, entries are split among
programs as in decode_split_kv.py; tiles of heads of a row are neighbours in the grid, so that what one reads the others
find in the L2 cache. In prefill, a program takes some query tokens of one row, each with a tile of heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.attention_inputs import PagedRows, QueryTiles, Scores
from quire.compute.kernels.reference.paged_attention import DecodePartials
from quire.compute.kernels.triton.attention.decode_split_kv import merge_kv_splits
from quire.compute.kernels.triton.attention.prefill import online_softmax
from quire.compute.kernels.triton.attention.score_scaling import padded_size, score_factors
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.device_properties import multiprocessors, program_memory
from quire.compute.kernels.triton.launching.launch import fast_launch

HEADS_OF_TILE = 16
"""Query heads of a program, the fewest rows of a matrix product."""
_PROGRAMS = 2
"""Programs of a multiprocessor at once."""
_MERGED = 1
"""Splits that the last program reads at a time: latents are wide."""
_AMPLE = 160 * 1024
"""Bytes of shared memory that programs may have on GPUs of data centers."""


@dataclass(frozen=True)
class _Shape:
    """How the work is divided into programs.

    Attributes:
        rows: Rows of prefill's matrix products.
        keys: Entries in a tile.
        warps: Warps of a program.
        stages: Tiles that are multiplied or on their way.
    """

    rows: int
    keys: int
    warps: int
    stages: int


def _shape(item: int, device: torch.device) -> _Shape:
    """Return a shape whose tiles of 576 elements fit; none was measured yet."""
    if item == 4 or program_memory(device) < _AMPLE:
        return _Shape(rows=16, keys=16, warps=8, stages=2)
    return _Shape(rows=64, keys=32, warps=8, stages=2)


def keys_of_tile(item: int, device: torch.device) -> int:
    """Return the number of entries in a tile, for queries of `item` bytes; splits begin at multiples of it."""
    return _shape(item, device).keys


def queries_of_tile(item: int, device: torch.device) -> int:
    """Return how many query tokens a tile has in prefill, for queries of `item` bytes."""
    return _shape(item, device).rows // HEADS_OF_TILE


def tiles_of_heads(heads: int) -> int:
    """Return the number of programs that share the heads of a token."""
    return -(-heads // HEADS_OF_TILE)


def splits_at_once(heads: int, device: torch.device) -> int:
    """Return how many splits the device computes in one round of programs."""
    return -(-_PROGRAMS * multiprocessors(device) // tiles_of_heads(heads))


def decode_latents(
    q: Tensor, latents: Tensor, rotated: int, block_table: Tensor, splits: Tensor, partials: DecodePartials,
    scale: float, out: Tensor,
) -> None:  # fmt: skip
    """Implement reference/latents.py's `decode_latents`; all tensors but the block table are contiguous."""
    assert all(map(Tensor.is_contiguous, (q, latents, splits, out)))
    assert splits.shape[0] <= partials.outputs.shape[0]
    heads, d = q.shape[1:]
    shape, tiles, overlap = _shape(q.element_size(), q.device), tiles_of_heads(heads), can_overlap(q.device)
    factor, _ = score_factors(Scores(scale))
    _decode_latents[(splits.shape[0] * tiles,)](
        q, latents, block_table, splits, partials.outputs, partials.sums, partials.arrived, out,
        block_table.stride(0), factor,
        HEADS=heads, TILES=tiles, M=HEADS_OF_TILE, R=rotated, R_BLOCK=padded_size(rotated), RANK=d - rotated,
        RANK_BLOCK=padded_size(d - rotated), BLOCK_SIZE=latents.shape[1], COLUMNS=splits.shape[1], TILE=shape.keys,
        MERGED=_MERGED, STAGES=shape.stages, OVERLAP=overlap, num_warps=shape.warps, launch_pdl=overlap,
    )  # fmt: skip


def prefill_latents(
    q: Tensor, latents: Tensor, rotated: int, rows: PagedRows, tiles: QueryTiles, queries: int, scale: float,
    out: Tensor,
) -> None:  # fmt: skip
    """Implement reference/latents.py's `prefill_latents`; all tensors but the block table are contiguous.

    `queries` comes from `queries_of_tile`.
    """
    block_table, slots, starts, counts = rows
    tile_rows, tile_offsets, first_tokens = tiles
    assert all(map(Tensor.is_contiguous, (q, latents, *tiles, starts, counts, slots, out)))
    heads, d = q.shape[1:]
    shape, overlap = _shape(q.element_size(), q.device), can_overlap(q.device)
    factor, _ = score_factors(Scores(scale))
    _prefill_latents[(tiles_of_heads(heads), tile_rows.shape[0])](
        q, latents, block_table, tile_rows, tile_offsets, starts, counts, first_tokens, slots, out,
        block_table.stride(0), factor,
        HEADS=heads, HEADS_OF_TILE=HEADS_OF_TILE, QUERIES=queries, R=rotated, R_BLOCK=padded_size(rotated),
        RANK=d - rotated, RANK_BLOCK=padded_size(d - rotated), BLOCK_SIZE=latents.shape[1], M=shape.rows,
        N=shape.keys, STAGES=shape.stages, OVERLAP=overlap, num_warps=shape.warps, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize=["block_table_stride"], do_not_specialize_on_alignment=["splits"])
def _decode_latents(
    q, latents, block_table, splits, outputs, sums, arrived, out, block_table_stride, factor,
    HEADS: tl.constexpr, TILES: tl.constexpr, M: tl.constexpr, R: tl.constexpr, R_BLOCK: tl.constexpr,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr, MERGED: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute one split and one tile of heads."""
    release_dependents(OVERLAP)
    split, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    column, head = tl.arange(0, RANK_BLOCK), tile * M + tl.arange(0, M)
    exists = (head < HEADS)[:, None] & (column < RANK)[None, :]
    wait_for_inputs(OVERLAP)
    line = splits + split * COLUMNS  # all of it is asked for at once: volatile loads stay before the branch
    token, slot = tl.load(line, volatile=True).to(tl.int64), tl.load(line + 1, volatile=True).to(tl.int64)
    begin, end = tl.load(line + 2, volatile=True), tl.load(line + 3, volatile=True)
    first, count = tl.load(line + 5, volatile=True), tl.load(line + 6, volatile=True)
    if count > 0:
        row = (token * HEADS + head) * (R + RANK)
        highest, weights, total = _over_entries(
            q, row, head < HEADS, latents, block_table + slot * block_table_stride, head * 0 + end, begin, end, factor,
            R, R_BLOCK, RANK, RANK_BLOCK, BLOCK_SIZE, M, TILE, STAGES,
        )  # fmt: skip
        if count == 1:
            result = out + (row + R)[:, None] + column[None, :]
            tl.store(result, (total / weights[:, None]).to(out.dtype.element_ty), exists)
        else:
            part = split * (TILES * M) + head
            tl.store(outputs + (part * RANK)[:, None] + column[None, :], total, (column < RANK)[None, :])
            tl.store(sums + part * 2, highest)
            tl.store(sums + part * 2 + 1, weights)
            tl.debug_barrier()  # all threads have stored before one of them says so
            counter = arrived + first * TILES + tile
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
                tl.store(counter, 0)
                merged = merge_kv_splits(
                    outputs, sums, first, count, tile * M, TILES * M, M, M, RANK, RANK_BLOCK, MERGED
                )
                result = out + (row + R)[:, None] + column[None, :]
                tl.store(result, merged.to(out.dtype.element_ty), exists)


@fast_launch
@triton.jit(
    do_not_specialize=["block_table_stride"],
    do_not_specialize_on_alignment=["tile_rows", "tile_offsets", "starts", "counts", "first_tokens", "slots"],
)
def _prefill_latents(
    q, latents, block_table, tile_rows, tile_offsets, starts, counts, first_tokens, slots, out, block_table_stride,
    factor,
    HEADS: tl.constexpr, HEADS_OF_TILE: tl.constexpr, QUERIES: tl.constexpr, R: tl.constexpr, R_BLOCK: tl.constexpr,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute a tile of queries and a tile of heads; row m of the products is query m // HEADS_OF_TILE, and head m %
    HEADS_OF_TILE of the tile.
    """
    release_dependents(OVERLAP)
    tile = tl.program_id(1)
    m, column = tl.arange(0, M), tl.arange(0, RANK_BLOCK)
    wait_for_inputs(OVERLAP)
    row, offset = tl.load(tile_rows + tile), tl.load(tile_offsets + tile).to(tl.int32)
    start, count = tl.load(starts + row).to(tl.int32), tl.load(counts + row).to(tl.int32)
    first, slot = tl.load(first_tokens + row), tl.load(slots + row)
    if offset >= count:
        return
    query, head = offset + m // HEADS_OF_TILE, tl.program_id(0) * HEADS_OF_TILE + m % HEADS_OF_TILE
    exists = (query < count) & (head < HEADS)
    where = ((first + query) * HEADS + head) * (R + RANK)
    end = start + tl.minimum(offset + QUERIES, count)
    _, weights, total = _over_entries(
        q, where, exists, latents, block_table + slot * block_table_stride, start + query + 1, 0, end, factor,
        R, R_BLOCK, RANK, RANK_BLOCK, BLOCK_SIZE, M, N, STAGES,
    )  # fmt: skip
    result = out + (where + R)[:, None] + column[None, :]
    tl.store(result, (total / weights[:, None]).to(out.dtype.element_ty), exists[:, None] & (column < RANK)[None, :])


@triton.jit
def _over_entries(
    q, row, exists, latents, blocks, ends, begin, stop, factor,
    R: tl.constexpr, R_BLOCK: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the highest scores and sums of weights [M], and sums of latents [M, RANK_BLOCK], over some entries.

    The queries begin at `row` of q, and see the entries of a row from `begin`, a multiple of N, to `stop`, each up to
    its own of `ends`.
    """
    turning, column, lane = tl.arange(0, R_BLOCK), tl.arange(0, RANK_BLOCK), tl.arange(0, N)
    turns, rests = (turning < R)[None, :], (column < RANK)[None, :]
    x_turned = tl.load(q + row[:, None] + turning[None, :], exists[:, None] & turns, 0.0)
    x = tl.load(q + (row + R)[:, None] + column[None, :], exists[:, None] & rests, 0.0)
    highest = tl.full((M,), float("-inf"), tl.float32)
    weights = tl.zeros((M,), tl.float32)
    total = tl.zeros((M, RANK_BLOCK), tl.float32)
    for at in tl.range(begin, stop, N, num_stages=STAGES):
        position = at + lane
        read = tl.minimum(position, stop - 1)  # for what nobody sees, something that is seen, so that it is a number
        block = tl.load(blocks + read // BLOCK_SIZE)
        entry = (block * BLOCK_SIZE + read % BLOCK_SIZE) * (R + RANK)
        turned = tl.load(latents + entry[:, None] + turning[None, :], turns & (read >= 0)[:, None], 0.0)
        latent = tl.load(latents + (entry + R)[:, None] + column[None, :], rests & (read >= 0)[:, None], 0.0)
        score = tl.dot(x_turned, tl.trans(turned), input_precision="ieee")
        score = tl.dot(x, tl.trans(latent), score, input_precision="ieee") * factor
        score = tl.where(position[None, :] < ends[:, None], score, float("-inf"))
        highest, weights, total = online_softmax(score, latent, highest, weights, total, False)
    return highest, weights, total
