"""Verification of drafts: a few integers a position, so what counts is that each op is one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.reference.sample import SamplingColumns
from quire.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.kernels.triton.launching.launch import cdiv, fast_launch

_BLOCK = 128
_WARPS = 4


def position_columns(slots: Tensor, offsets: Tensor, asked: SamplingColumns, out: SamplingColumns) -> None:
    """Arguments as in reference/drafts.py; all are contiguous."""
    options = {"BLOCK": _BLOCK, "OVERLAP": can_overlap(slots.device), "num_warps": _WARPS}
    options["launch_pdl"] = options["OVERLAP"]
    _position_columns[(cdiv(len(slots), _BLOCK),)](slots, offsets, *asked, *out, len(slots), **options)


def keep_drafts(
    tokens: Tensor,
    faults: Tensor,
    next_drafts: Tensor,
    ends: Tensor,
    slots: Tensor,
    most: int,
    length: Tensor,
    last: Tensor,
    drawn: Tensor,
) -> None:
    """Arguments as in reference/drafts.py; all are contiguous."""
    options = {"BLOCK": _BLOCK, "OVERLAP": can_overlap(slots.device), "num_warps": _WARPS}
    options["launch_pdl"] = options["OVERLAP"]
    _keep_drafts[(cdiv(len(ends), _BLOCK),)](
        tokens, faults, next_drafts, ends, slots, len(ends), most, length, last, drawn, **options
    )


@fast_launch
@triton.jit(
    do_not_specialize=["number"],
    do_not_specialize_on_alignment=[
        "slots", "offsets", "temperature", "top_k", "top_p", "min_p", "seed", "drawn", "own_temperature", "own_top_k",
        "own_top_p", "own_min_p", "own_seed", "own_drawn",
    ],
)  # fmt: skip
def _position_columns(
    slots, offsets, temperature, top_k, top_p, min_p, seed, drawn, own_temperature, own_top_k, own_top_p, own_min_p,
    own_seed, own_drawn, number, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < number
    wait_for_inputs(OVERLAP)
    slot = tl.load(slots + at, inside, 0)
    tl.store(own_temperature + at, tl.load(temperature + slot, inside, 0), inside)
    tl.store(own_top_k + at, tl.load(top_k + slot, inside, 0), inside)
    tl.store(own_top_p + at, tl.load(top_p + slot, inside, 0), inside)
    tl.store(own_min_p + at, tl.load(min_p + slot, inside, 0), inside)
    tl.store(own_seed + at, tl.load(seed + slot, inside, 0), inside)
    tl.store(own_drawn + at, tl.load(drawn + slot, inside, 0) + tl.load(offsets + at, inside, 0), inside)


@fast_launch
@triton.jit(
    do_not_specialize=["rows", "most"],
    do_not_specialize_on_alignment=["tokens", "faults", "next_drafts", "ends", "slots", "length", "last", "drawn"],
)
def _keep_drafts(
    tokens, faults, next_drafts, ends, slots, rows, most, length, last, drawn,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A row a lane: it goes on as long as what was sampled is the draft behind it."""
    release_dependents(OVERLAP)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    wait_for_inputs(OVERLAP)
    first = tl.load(ends + row - 1, inside & (row > 0), 0)
    end = tl.load(ends + row, inside, 0)
    place, goes_on = first, inside
    for _ in range(most):
        token, draft = tl.load(tokens + place, goes_on, 0), tl.load(next_drafts + place, goes_on, -1)
        goes_on = goes_on & (token == draft) & (tl.load(faults + place, goes_on, 1) == 0)
        place = tl.where(goes_on, place + 1, place)
    slot, gained = tl.load(slots + first, inside, 0), place - first + 1
    tl.store(last + slot, tl.load(tokens + place, inside, 0), inside)
    tl.store(drawn + slot, tl.load(drawn + slot, inside, 0) + gained, inside)
    tl.store(length + slot, tl.load(length + slot, inside, 0) + gained - (end - first), inside)
