"""The beginning of a step: who owns the slots of the slot table, where rows and tokens stand by it, and the tokens'
embeddings and angles.

There are a few integers a token, so the number of launches decides the time. Where each row has one token, one kernel
reads a slot's length and moves it on. Otherwise several programs read the same length, and a second kernel moves it. A
new owner is a few numbers and one line of each block table: programs share the lines, and the programs of the first
part write the numbers.

An embedding reads and writes its row, 16 bytes a thread. Angles write a number for each turning dimension and read next
to nothing; sines and cosines are the precise ones, whose arguments are reduced exactly even at 100,000 radians."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, next_power_of_2

_BLOCK = 256
_WARPS = 4
_LINE = 1_024
"""Entries of a block table that a program empties."""
_COLUMNS_AT_ONCE = 1_024
"""Columns of an embedding that a program copies."""
_TOKENS = 8
"""Tokens whose angles one program computes."""
_COLUMNS = [
    "slots", "counts", "row_of_token", "offsets", "ids", "length", "last", "starts", "positions", "slot_of_token",
    "tokens",
]  # fmt: skip
"""Columns may begin anywhere in a buffer: their alignment must not ask for another compilation."""


def prepare_inputs(
    slots: Tensor, counts: Tensor, row_of_token: Tensor, offsets: Tensor, ids: Tensor, length: Tensor, last: Tensor,
    dummy: int, starts: Tensor, positions: Tensor, slot_of_token: Tensor, tokens: Tensor,
) -> None:  # fmt: skip
    """Rows stand in order, and each has one token if there are as many rows as tokens; all are contiguous."""
    rows, total = len(slots), len(ids)
    options = {"BLOCK": _BLOCK, "OVERLAP": can_overlap(slots.device), "num_warps": _WARPS}
    options["launch_pdl"] = options["OVERLAP"]
    if rows == total:
        _prepare_decode_inputs[(cdiv(rows, _BLOCK),)](
            slots, ids, length, last, rows, dummy, starts, positions, slot_of_token, tokens, **options
        )
        return
    _prepare_tokens[(cdiv(total, _BLOCK),)](
        slots, row_of_token, offsets, ids, length, last, total, positions, slot_of_token, tokens, **options
    )
    _advance_slots[(cdiv(rows, _BLOCK),)](slots, counts, length, rows, dummy, starts, **options)


def init_slots(slots: Tensor, ints: Tensor, floats: Tensor, of_ints: Tensor, of_floats: Tensor, tables: Tensor) -> None:
    """Implement reference/step_inputs.py's `init_slots`; all tensors are contiguous."""
    groups, every, blocks = tables.shape
    columns = len(of_ints), len(of_floats)
    _init_slots[(len(slots), cdiv(blocks, _LINE), groups)](
        slots, ints, floats, of_ints, of_floats, tables, every, blocks, *columns, _LINE, num_warps=_WARPS
    )


@fast_launch
@triton.jit(do_not_specialize=["rows", "dummy"], do_not_specialize_on_alignment=_COLUMNS)
def _prepare_decode_inputs(
    slots, ids, length, last, rows, dummy, starts, positions, slot_of_token, tokens,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Row r has token r. Only the dummy slot may have several rows."""
    release_dependents(OVERLAP)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    wait_for_inputs(OVERLAP)
    slot = tl.load(slots + row, inside, 0)
    start = tl.load(length + slot, inside, 0)
    given = tl.load(ids + row, inside, 0)
    drawn = tl.load(last + slot, inside & (given < 0), 0)
    tl.store(starts + row, start, inside)
    tl.store(positions + row, start, inside)
    tl.store(slot_of_token + row, slot, inside)
    tl.store(tokens + row, tl.where(given < 0, drawn, given), inside)
    tl.store(length + slot, start + 1, inside & (slot != dummy))


@fast_launch
@triton.jit(do_not_specialize=["total"], do_not_specialize_on_alignment=_COLUMNS)
def _prepare_tokens(
    slots, row_of_token, offsets, ids, length, last, total, positions, slot_of_token, tokens,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < total
    wait_for_inputs(OVERLAP)
    slot = tl.load(slots + tl.load(row_of_token + token, inside, 0), inside, 0)
    given = tl.load(ids + token, inside, 0)
    drawn = tl.load(last + slot, inside & (given < 0), 0)
    start = tl.load(length + slot, inside, 0)
    tl.store(positions + token, start + tl.load(offsets + token, inside, 0), inside)
    tl.store(slot_of_token + token, slot, inside)
    tl.store(tokens + token, tl.where(given < 0, drawn, given), inside)


@fast_launch
@triton.jit(do_not_specialize=["rows", "dummy"], do_not_specialize_on_alignment=_COLUMNS)
def _advance_slots(slots, counts, length, rows, dummy, starts, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    release_dependents(OVERLAP)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    wait_for_inputs(OVERLAP)
    slot = tl.load(slots + row, inside, 0)
    start = tl.load(length + slot, inside, 0)
    tl.store(starts + row, start, inside)
    tl.store(length + slot, start + tl.load(counts + row, inside, 0), inside & (slot != dummy))


@fast_launch
@triton.jit(
    do_not_specialize=["every", "blocks"],
    do_not_specialize_on_alignment=["slots", "ints", "floats", "of_ints", "of_floats", "tables"],
)
def _init_slots(
    slots, ints, floats, of_ints, of_floats, tables, every, blocks,
    INTS: tl.constexpr, FLOATS: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    owner, part, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + owner)
    if part + group == 0:
        for column in tl.static_range(INTS):
            tl.store(of_ints + column * every + slot, tl.load(ints + owner * INTS + column))
        for column in tl.static_range(FLOATS):
            tl.store(of_floats + column * every + slot, tl.load(floats + owner * FLOATS + column).to(tl.float32))
    index = part * LINE + tl.arange(0, LINE)
    line = tables + (group * every + slot) * blocks
    tl.store(line + index, 0, index < blocks)


def embed(tokens: Tensor, weight: Tensor, scale: float | None, out: Tensor) -> None:
    assert weight.is_contiguous() and out.is_contiguous()
    if not len(tokens):
        return
    width, overlap = weight.shape[1], can_overlap(weight.device)
    parts = cdiv(width, _COLUMNS_AT_ONCE)
    _embed[(len(tokens) * parts,)](
        tokens, weight, scale, out, WIDTH=width, PARTS=parts, BLOCK=_COLUMNS_AT_ONCE, OVERLAP=overlap, num_warps=_WARPS,
        launch_pdl=overlap,
    )  # fmt: skip


def angles(positions: Tensor, frequencies: Tensor, scale: float, cos: Tensor, sin: Tensor) -> None:
    assert all(t.is_contiguous() for t in (positions, frequencies, cos, sin))
    total, half = cos.shape
    if not total:
        return
    overlap = can_overlap(cos.device)
    _angles[(cdiv(total, _TOKENS),)](
        positions, frequencies, cos, sin, total, scale,
        HALF=half, BLOCK=next_power_of_2(half), TOKENS=_TOKENS, EACH=frequencies.dim() == 2, OVERLAP=overlap,
        num_warps=_WARPS, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["tokens"])
def _embed(
    tokens, weight, scale, out,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    place = (tl.program_id(0) // PARTS).to(tl.int64)
    column = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(OVERLAP)
    row = tl.load(tokens + place)
    values = tl.load(weight + row * WIDTH + column, column < WIDTH, 0.0)
    if scale is not None:
        values = (values.to(tl.float32) * scale).to(values.dtype)
    tl.store(out + place * WIDTH + column, values, column < WIDTH)


@fast_launch
@triton.jit(do_not_specialize=["total"], do_not_specialize_on_alignment=["positions"])
def _angles(
    positions, frequencies, cos, sin, total, scale,
    HALF: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, EACH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute angles of TOKENS tokens, which have frequencies of their own where EACH, and otherwise share them."""
    release_dependents(OVERLAP)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    pair = tl.arange(0, BLOCK)
    place = token.to(tl.int64)[:, None] * HALF + pair[None, :]
    mask = (token < total)[:, None] & (pair < HALF)[None, :]
    wait_for_inputs(OVERLAP)
    position = tl.load(positions + token, token < total, 0).to(tl.float32)
    if EACH:
        frequency = tl.load(frequencies + place, mask, 0.0)
    else:
        frequency = tl.load(frequencies + pair, pair < HALF, 0.0)[None, :]
    angle = position[:, None] * frequency
    tl.store(cos + place, (tl.cos(angle) * scale).to(cos.dtype.element_ty), mask)
    tl.store(sin + place, (tl.sin(angle) * scale).to(sin.dtype.element_ty), mask)
