"""Gates and ups of few rows with the low-rank updates of these, in one launch.

What adapters read is next to nothing beside the weight; what costs time is a kernel behind the product that adds B A x
and applies the gate. Here programs of the product's own grid compute A x, others B A x, while the product reads its
weight; a product's program adds that and applies the gate before it writes. How values get from one program to the
other: see linear/row_updates.py.

In the grid those that compute A x come first, then those that compute B A x, and GPUs start programs in that order: so
who waits for others always waits for programs that run.

No layer calls it yet: first a GPU has to say that it is faster than what `AdaptedLinear` does.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.reference.lora import LowRankWeights, Tiles, lies_beside
from quire.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.kernels.triton.launching.device_properties import multiprocessors, program_memory
from quire.kernels.triton.launching.launch import fast_launch, next_power_of_2
from quire.kernels.triton.linear.gemm import GemmConfig, multiply_tile, scratch_of_tiles, tiles_of
from quire.kernels.triton.linear.inner_loops import fetch_ahead, gemm_loop
from quire.kernels.triton.linear.linear import config_for
from quire.kernels.triton.linear.row_updates import NOTHING_YET, hand_over
from quire.kernels.triton.linear.tuned_linear_configs import OVERLAP
from quire.kernels.triton.lora import counters_of_splits, lora_expand_silu_and_mul
from quire.kernels.triton.lora_linear import MOST_ROWS, MOST_SPLITS, MOST_TILES, config_beside, linear_and_shrink

_BLOCK_R = 16
_INTEGERS = {2: torch.int16, 4: torch.int32}
"""By bytes."""
_OUTPUTS_OF_WARP = 64
"""Of B that a program asks for at once: more take so many registers that those of other programs find no room."""


def updated_linear_silu_and_mul(
    x: Tensor, packed: Tensor, bias: Tensor | None, weights: LowRankWeights, tiles: Tiles, out: Tensor
) -> None:
    """Arguments as in reference/lora.py: x is contiguous, and the rank is a multiple of 16."""
    if (chosen := _config_for(x, packed, weights, tiles)) is None:
        y, low = linear_and_shrink(x, packed, bias, weights, tiles)
        lora_expand_silu_and_mul(low, weights, tiles, y, out)
    else:
        gated_gemm_and_update(x, packed, bias, weights, tiles, out, *chosen, OVERLAP and can_overlap(x.device))


def _config_for(x: Tensor, w: Tensor, weights: LowRankWeights, tiles: Tiles) -> tuple[GemmConfig, int] | None:
    """A product's config, and how many programs there are for updates; None: with so many rows, or on this GPU, product
    and updates are kernels of their own."""
    if len(x) > MOST_ROWS or not 0 < len(tiles.rows) <= MOST_TILES:
        return None
    for config in (config_for(x, w, gate=False), config_for(x, w, gate=True)):  # the first leaves more room
        if isinstance(config, GemmConfig):
            blocks = 2 * min(config.block_m, len(weights.ranks)) * (weights.b.shape[2] // _BLOCK_R)
            room = multiprocessors(x.device), program_memory(x.device)
            count = tiles_of(len(x), len(w) // 2, config, gate=True)
            if (beside := config_beside(config, *room, count, x.element_size(), blocks)) is not None:
                return beside
    return None


def gated_gemm_and_update(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    weights: LowRankWeights,
    tiles: Tiles,
    out: Tensor,
    config: GemmConfig,
    programs: int,
    overlap: bool,
) -> None:
    """What `gemm` makes with this config and a gate, with updates by so many programs, two at least."""
    (rows, columns), width, (number, size) = x.shape, len(w) // 2, tiles.rows.shape
    rank, splits, scaling = weights.b.shape[2], config.splits, weights.scaling
    assert weights.rows == (width, width) and tiles.slot_of_row is not None
    assert x.is_contiguous() and tiles.rows.is_contiguous() and out.is_contiguous()
    assert rank % _BLOCK_R == 0 and 0 < number <= MOST_TILES
    assert scaling is None or lies_beside(scaling, weights)
    product_tiles = tiles_of(rows, width, config, gate=True)
    sums, arrived = scratch_of_tiles(out, product_tiles, splits, config.block_m * config.block_n)
    shrinking = max(1, programs // 3)
    expanding = max(1, programs - shrinking)
    blocks = max(shrinking, number * (rank // _BLOCK_R))
    factors, summands, scaled = scaling or (None, None, None)
    most = (config.block_m + config.block_n) * config.block_k
    block_c, block_o = (1 << (each.bit_length() - 1) for each in (most // (size + 2 * _BLOCK_R), most // _BLOCK_R))
    block_o = min(block_o, _OUTPUTS_OF_WARP * config.warps, max(16, next_power_of_2(width)))
    _gated_tile_and_update_kernel[(shrinking + expanding + product_tiles * splits,)](
        x, w, w if bias is None else bias, out, sums, arrived,
        weights.a, weights.b, weights.ranks, factors, summands, scaled, tiles.slots, tiles.rows, tiles.slot_of_row,
        _nothing_yet("A x", next_power_of_2(blocks * size * 2 * _BLOCK_R), torch.int32, x.device),
        counters_of_splits(x.device), x.new_empty((expanding, size, 2 * rank)),
        _nothing_yet("B A x", MOST_ROWS * 2 * width, _INTEGERS[x.element_size()], x.device),
        rows, width, columns, product_tiles, splits, number, shrinking, expanding,
        weights.a.stride(0), weights.b.stride(0), weights.ranks.stride(0),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLIT=splits > 1,
        WHOLE=columns % config.block_k == 0, SWAPPED=config.swapped, BIASED=bias is not None,
        RANK=rank, WIDTH=width, MOST_TILES=MOST_TILES, MOST_SPLITS=MOST_SPLITS,
        BLOCK_T=size, BLOCK_R=_BLOCK_R, BLOCK_C=block_c, WHOLE_C=columns % block_c == 0, BLOCK_O=block_o,
        OVERLAP=overlap, num_warps=config.warps, num_stages=config.stages, launch_pdl=overlap,
    )  # fmt: skip


@functools.cache
def _nothing_yet(what: str, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where `what` is handed over. Products of a device run one after another, on one stream. A graph's capture must
    not make it: others might be replayed before that one."""
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
    return torch.full((elements,), NOTHING_YET.value, dtype=dtype, device=device)


@fast_launch
@triton.jit(
    do_not_specialize=["rows", "tiles", "product_tiles", "splits", "shrinking", "expanding"],
    do_not_specialize_on_alignment=[
        "ranks",
        "ranks_stride",
        "factors",
        "summands",
        "scaled",
        "slots",
        "tile_rows",
        "slot_of_row",
    ],
)
def _gated_tile_and_update_kernel(
    x,
    w,
    bias,
    y,
    sums,
    arrived,
    a,
    b,
    ranks,
    factors,
    summands,
    scaled,
    slots,
    tile_rows,
    slot_of_row,
    partial,
    arrived_low,
    low,
    update,
    rows,
    width,
    columns,
    product_tiles,
    splits,
    tiles,
    shrinking,
    expanding,
    a_stride,
    b_stride,
    ranks_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    SWAPPED: tl.constexpr,
    BIASED: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST_TILES: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WHOLE_C: tl.constexpr,
    BLOCK_O: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A part of all A x, a part of all B A x, or a tile of the product.

    Tiles of rows are read behind the wait: in front of a step's first product there are only a few small kernels
    between this one and the one that writes them.
    """
    program = tl.program_id(0)
    if program < shrinking + expanding:
        wait_for_inputs(OVERLAP)
        release_dependents(OVERLAP)
        if program < shrinking:
            _shrink_tiles(
                program, shrinking, x, a, ranks, slots, tile_rows, partial, columns, tiles, a_stride, ranks_stride,
                RANK, MOST_TILES, MOST_SPLITS, BLOCK_T, BLOCK_R, BLOCK_C, WHOLE_C,
            )  # fmt: skip
        else:
            _expand_tiles(
                program - shrinking, shrinking, expanding, b, ranks, slots, tile_rows, partial, arrived_low, low,
                update, columns, tiles, b_stride, ranks_stride,
                RANK, WIDTH, MOST_TILES, MOST_SPLITS, BLOCK_T, BLOCK_R, BLOCK_C, BLOCK_O, OVERLAP,
            )  # fmt: skip
    else:
        number = program - shrinking - expanding
        multiply_tile(
            number % product_tiles, number // product_tiles, splits, x, w, bias, y, sums, arrived,
            rows, width, columns, columns,
            update, slot_of_row, factors, summands, scaled, b_stride, ranks_stride,
            BLOCK_M, BLOCK_N, BLOCK_K, SPLIT, WHOLE, SWAPPED, True, BIASED, OVERLAP, False, True,
        )  # fmt: skip


@triton.jit
def _shrink_tiles(
    program,
    programs,
    x,
    a,
    ranks,
    slots,
    rows,
    partial,
    columns,
    tiles,
    a_stride,
    ranks_stride,
    RANK: tl.constexpr,
    MOST_TILES: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WHOLE_C: tl.constexpr,
):
    """Each `programs`th part of A x: of a tile BLOCK_R ranks of gate and up, over all columns or one part of them."""
    GROUPS: tl.constexpr = RANK // BLOCK_R
    slots_of_tiles = _slots_of_tiles(slots, tiles, MOST_TILES)
    blocks = GROUPS * _number_of(slots_of_tiles)
    splits = _splits_of(blocks, programs, columns, MOST_SPLITS, BLOCK_C)
    steps = tl.cdiv(columns, BLOCK_C)
    both = tl.arange(0, 2 * BLOCK_R)
    for number in range(program, blocks * splits, programs):
        split = number % splits
        group = number // splits % GROUPS
        tile = number // (splits * GROUPS)
        slot = _slot_of(slots_of_tiles, tile, MOST_TILES)
        row = tl.load(rows + tile * BLOCK_T + tl.arange(0, BLOCK_T))
        rank = both // BLOCK_R * RANK + group * BLOCK_R + both % BLOCK_R
        if tl.load(ranks + slot * ranks_stride) > group * BLOCK_R:
            sums = gemm_loop(
                x, row * columns, row >= 0, a + slot * a_stride, rank.to(tl.int64) * columns, columns,
                split * steps // splits, (split + 1) * steps // splits, BLOCK_T, 2 * BLOCK_R, BLOCK_C, WHOLE_C, False,
            )  # fmt: skip
            place = _places(BLOCK_T, 2 * BLOCK_R, 2 * BLOCK_R)
            hand_over(partial + number * (BLOCK_T * 2 * BLOCK_R) + place, sums, place >= 0)


@triton.jit
def _expand_tiles(
    program,
    shrinking,
    programs,
    b,
    ranks,
    slots,
    rows,
    partial,
    arrived,
    low,
    update,
    columns,
    tiles,
    b_stride,
    ranks_stride,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST_TILES: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_O: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Each `programs`th part of B A x: some blocks of outputs of a tile; 0 where the adapter leaves the product alone.
    Each adds up A x itself, in the order of the columns; the last one of a tile clears what all of them have read.
    """
    GROUPS: tl.constexpr = RANK // BLOCK_R
    SIZE: tl.constexpr = BLOCK_T * 2 * BLOCK_R
    HALF: tl.constexpr = (WIDTH + BLOCK_O - 1) // BLOCK_O
    LINES: tl.constexpr = BLOCK_O * RANK // 64
    dtype: tl.constexpr = low.dtype.element_ty
    slots_of_tiles = _slots_of_tiles(slots, tiles, MOST_TILES)
    in_use = _number_of(slots_of_tiles)
    splits = _splits_of(GROUPS * in_use, shrinking, columns, MOST_SPLITS, BLOCK_C)
    parts = _parts_of(in_use, programs, 2 * HALF)
    own = low + program * (BLOCK_T * 2 * RANK) + _places(BLOCK_T, BLOCK_R, 2 * RANK)
    rank = tl.arange(0, BLOCK_R)[None, :]
    for number in range(program, in_use * parts, programs):
        tile = number // parts
        part = number % parts
        slot = _slot_of(slots_of_tiles, tile, MOST_TILES)
        row = tl.load(rows + tile * BLOCK_T + tl.arange(0, BLOCK_T))
        used = tl.load(ranks + slot * ranks_stride)
        first_block = part * (2 * HALF) // parts
        last_block = (part + 1) * (2 * HALF) // parts
        of_slot = b + slot * b_stride
        if OVERLAP:
            begin = (first_block % HALF * BLOCK_O + first_block // HALF * WIDTH) * RANK
            lines = tl.minimum(begin + tl.arange(0, LINES) * 64, (2 * WIDTH - 1) * RANK)
            fetch_ahead(of_slot, lines.to(tl.int64), 0, RANK, LINES, 64)
        theirs = partial + tile * GROUPS * splits * SIZE
        gate_low = tl.zeros((BLOCK_T, BLOCK_R), dtype)
        up_low = gate_low
        if used > 0:
            gate_low, up_low = _totals(theirs, splits, MOST_SPLITS, BLOCK_T, BLOCK_R, dtype)
        if GROUPS > 1:
            for first in range(BLOCK_R, used, BLOCK_R):
                of_group = theirs + first // BLOCK_R * splits * SIZE
                gate_more, up_more = _totals(of_group, splits, MOST_SPLITS, BLOCK_T, BLOCK_R, dtype)
                tl.store(own + first, gate_more)
                tl.store(own + RANK + first, up_more)
            tl.debug_barrier()
        for step in range(last_block - first_block):
            block = first_block + step
            module = block // HALF
            place = block % HALF * BLOCK_O + tl.arange(0, BLOCK_O)
            inside, output = place < WIDTH, module * WIDTH + place
            of_rows = of_slot + output[:, None] * RANK + rank
            weight = tl.load(of_rows, inside[:, None], 0.0)
            its_low = tl.where(module == 0, gate_low, up_low)
            sums = tl.dot(its_low, tl.trans(weight), input_precision="ieee")
            if GROUPS > 1:
                for first in range(BLOCK_R, used, BLOCK_R):
                    weight = tl.load(of_rows + first, inside[:, None], 0.0)
                    its_low = tl.load(own + module * RANK + first)
                    sums = tl.dot(its_low, tl.trans(weight), sums, input_precision="ieee")
            at = update + row[:, None] * (2 * WIDTH) + output[None, :]
            hand_over(at, sums.to(dtype), (row >= 0)[:, None] & inside[None, :])
        if used > 0:
            tl.debug_barrier()  # all threads have read
            if tl.atomic_add(arrived + tile, 1) == parts - 1:
                tl.store(arrived + tile, 0)
                for each in range(GROUPS * splits):
                    nothing = tl.full((BLOCK_T, 2 * BLOCK_R), NOTHING_YET, partial.dtype.element_ty)
                    tl.store(theirs + each * SIZE + _places(BLOCK_T, 2 * BLOCK_R, 2 * BLOCK_R), nothing)


@triton.jit
def _totals(
    parts, splits, MOST_SPLITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, dtype: tl.constexpr
):
    """[BLOCK_T, BLOCK_R] of the gate, and of up: A x of all columns, from its parts, which lie behind each other."""
    split = tl.arange(0, MOST_SPLITS)[:, None, None]
    at = parts + split * (BLOCK_T * 2 * BLOCK_R) + _places(BLOCK_T, 2 * BLOCK_R, 2 * BLOCK_R)[None, :, :]
    bits = tl.load(at, split < splits, 0, volatile=True)
    while tl.max(tl.max(tl.max((bits == NOTHING_YET).to(tl.int32), 2), 1), 0) > 0:
        bits = tl.load(at, split < splits, 0, volatile=True)
    total = tl.sum(bits.to(tl.float32, bitcast=True), 0).to(dtype)
    return tl.split(tl.permute(tl.reshape(total, (BLOCK_T, 2, BLOCK_R)), (0, 2, 1)))


@triton.jit
def _slots_of_tiles(slots, tiles, MOST_TILES: tl.constexpr):
    """[MOST_TILES]: of few tiles or of all for which there is room; those in use come first."""
    every = tl.arange(0, MOST_TILES)
    return tl.load(slots + every, every < tiles, 0)


@triton.jit
def _number_of(slots):
    """How many tiles are in use."""
    return tl.sum((slots != 0).to(tl.int32), 0)


@triton.jit
def _slot_of(slots, tile, MOST_TILES: tl.constexpr):
    """A tile's, from 0; memory would have to be asked again."""
    return tl.sum(tl.where(tl.arange(0, MOST_TILES) == tile, slots, 0), 0) - 1


@triton.jit
def _splits_of(blocks, programs, columns, MOST_SPLITS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Into how many parts the columns of a block are cut, so that every program has some."""
    most = tl.minimum(MOST_SPLITS, tl.cdiv(columns, BLOCK_C))
    return tl.maximum(1, tl.minimum(programs // tl.maximum(blocks, 1), most))


@triton.jit
def _parts_of(tiles, programs, blocks):
    """Into how many parts the outputs of a tile are cut: one for each program, or three, so that they are even, where
    there are few programs for a tile."""
    each = programs // tl.maximum(tiles, 1)
    return tl.maximum(1, tl.minimum(tl.where(each > 1, each, 3 * programs // tl.maximum(tiles, 1)), blocks))


@triton.jit
def _places(ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, COLUMNS] in memory of rows so wide."""
    return tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, COLUMNS)[None, :]
