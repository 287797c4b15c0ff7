"""The beginning of a step: where its rows and tokens stand, by the slot table.

A few integers a token, so what counts is how many launches there are. Where each row has one token, one kernel reads a
slot's length and moves it on. Otherwise programs that know nothing of each other read the same length, and it is moved
by a second kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.kernels.triton.launching.launch import cdiv, launched

_BLOCK = 256
_WARPS = 4
_COLUMNS = (
    "slots",
    "counts",
    "row_of_token",
    "offsets",
    "ids",
    "length",
    "last",
    "starts",
    "positions",
    "slot_of_token",
    "tokens",
)
"""Columns may begin anywhere in a buffer: where they do must not ask for another compilation."""


def begin_step(
    slots: Tensor,
    counts: Tensor,
    row_of_token: Tensor,
    offsets: Tensor,
    ids: Tensor,
    length: Tensor,
    last: Tensor,
    dummy: int,
    starts: Tensor,
    positions: Tensor,
    slot_of_token: Tensor,
    tokens: Tensor,
) -> None:
    """See the reference. Every row has a token, and rows stand in order; all are contiguous."""
    rows, total = len(slots), len(ids)
    options = {"BLOCK": _BLOCK, "OVERLAP": can_overlap(slots.device), "num_warps": _WARPS}
    options["launch_pdl"] = options["OVERLAP"]
    if rows == total:
        _begin_single_tokens[(cdiv(rows, _BLOCK),)](
            slots, ids, length, last, rows, dummy, starts, positions, slot_of_token, tokens, **options
        )
        return
    _place_tokens[(cdiv(total, _BLOCK),)](
        slots, row_of_token, offsets, ids, length, last, total, positions, slot_of_token, tokens, **options
    )
    _move_rows[(cdiv(rows, _BLOCK),)](slots, counts, length, rows, dummy, starts, **options)


@launched
@triton.jit(do_not_specialize=["rows", "dummy"], do_not_specialize_on_alignment=_COLUMNS)
def _begin_single_tokens(
    slots,
    ids,
    length,
    last,
    rows,
    dummy,
    starts,
    positions,
    slot_of_token,
    tokens,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Row r has token r. Several rows may be the dummy's, but nobody else's."""
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


@launched
@triton.jit(do_not_specialize=["total"], do_not_specialize_on_alignment=_COLUMNS)
def _place_tokens(
    slots,
    row_of_token,
    offsets,
    ids,
    length,
    last,
    total,
    positions,
    slot_of_token,
    tokens,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
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


@launched
@triton.jit(do_not_specialize=["rows", "dummy"], do_not_specialize_on_alignment=_COLUMNS)
def _move_rows(slots, counts, length, rows, dummy, starts, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    release_dependents(OVERLAP)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    wait_for_inputs(OVERLAP)
    slot = tl.load(slots + row, inside, 0)
    start = tl.load(length + slot, inside, 0)
    tl.store(starts + row, start, inside)
    tl.store(length + slot, start + tl.load(counts + row, inside, 0), inside & (slot != dummy))
