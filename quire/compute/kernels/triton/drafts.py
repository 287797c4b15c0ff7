"""Drafts: a few integers a position, so what counts is that each op is one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.drafts import FIRST_NAMED
from quire.compute.kernels.reference.sample import SamplingColumns
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch

_BLOCK = 128
_WARPS = 4
_FIRST_NAMED = tl.constexpr(FIRST_NAMED)


def look_up_tokens(ids: Tensor, slots: Tensor, known: Tensor, out: Tensor) -> None:
    """Arguments as in reference/drafts.py; all are contiguous."""
    options = _options(slots.device)
    _look_up_tokens[(cdiv(len(ids), _BLOCK),)](ids, slots, known, known.shape[1], out, len(ids), **options)


def follow_slots(
    slots: Tensor, row_of_token: Tensor, offsets: Tensor, ids: Tensor, followed_length: Tensor, followed_drawn: Tensor,
    before: int, length: Tensor, drawn: Tensor,
) -> None:  # fmt: skip
    """Arguments as in reference/drafts.py; all are contiguous."""
    options = _options(slots.device)
    _follow_slots[(cdiv(len(ids), _BLOCK),)](
        slots, row_of_token, offsets, ids, followed_length, followed_drawn, before, length, drawn, len(ids), **options
    )


def note_drafts(slots: Tensor, last: Tensor, drawn: Tensor, drawn_before: Tensor, drafts: Tensor) -> None:
    """Arguments as in reference/drafts.py; all are contiguous."""
    options = _options(slots.device)
    _note_drafts[(cdiv(len(slots), _BLOCK),)](
        slots, last, drawn, drawn_before, drafts, drafts.shape[1], len(slots), **options
    )


def position_columns(slots: Tensor, offsets: Tensor, asked: SamplingColumns, out: SamplingColumns) -> None:
    """Arguments as in reference/drafts.py; all are contiguous."""
    options = _options(slots.device)
    _position_columns[(cdiv(len(slots), _BLOCK),)](slots, offsets, *asked, *out, len(slots), **options)


def verify_drafts(
    tokens: Tensor, faults: Tensor, next_drafts: Tensor, ends: Tensor, slots: Tensor, length: Tensor, last: Tensor,
    drawn: Tensor, recent: Tensor, counts: Tensor,
) -> None:  # fmt: skip
    """Arguments as in reference/drafts.py; all are contiguous."""
    options = _options(slots.device)
    _verify_drafts[(cdiv(len(ends), _BLOCK),)](
        tokens, faults, next_drafts, ends, slots, len(ends), length, last, drawn, recent, recent.shape[1], counts,
        **options,
    )  # fmt: skip


def _options(device: torch.device) -> dict[str, Any]:
    overlap = can_overlap(device)
    return {"BLOCK": _BLOCK, "OVERLAP": overlap, "num_warps": _WARPS, "launch_pdl": overlap}


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
@triton.jit(do_not_specialize=["number", "width"], do_not_specialize_on_alignment=["ids", "slots", "known", "out"])
def _look_up_tokens(ids, slots, known, width, out, number, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    release_dependents(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(OVERLAP)
    place = _FIRST_NAMED - tl.load(ids + at, at < number, 0)
    named = (at < number) & (place >= 0)
    slot = tl.load(slots + at, named, 0)
    tl.store(out + at, tl.load(known + slot * width + place, named, 0), named)


@fast_launch
@triton.jit(
    do_not_specialize=["before", "number"],
    do_not_specialize_on_alignment=[
        "slots", "row_of_token", "offsets", "ids", "followed_length", "followed_drawn", "length", "drawn",
    ],
)  # fmt: skip
def _follow_slots(
    slots, row_of_token, offsets, ids, followed_length, followed_drawn, before, length, drawn, number,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < number
    wait_for_inputs(OVERLAP)
    place = _FIRST_NAMED - tl.load(ids + at, inside, 0)
    first = inside & (place >= 0) & (tl.load(offsets + at, inside, 1) == 0)
    slot = tl.load(slots + tl.load(row_of_token + at, first, 0), first, 0)
    tl.store(length + slot, tl.load(followed_length + slot, first, 0) - before + place, first)
    tl.store(drawn + slot, tl.load(followed_drawn + slot, first, 0), first)


@fast_launch
@triton.jit(
    do_not_specialize=["width", "rows"],
    do_not_specialize_on_alignment=["slots", "last", "drawn", "drawn_before", "drafts"],
)
def _note_drafts(slots, last, drawn, drawn_before, drafts, width, rows, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    release_dependents(OVERLAP)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    wait_for_inputs(OVERLAP)
    slot = tl.load(slots + row, inside, 0)
    place = tl.load(drawn + slot, inside, 0) - tl.load(drawn_before + slot, inside, 0) - 1
    fits = inside & (place >= 0) & (place < width)
    tl.store(drafts + slot * width + place, tl.load(last + slot, fits, 0), fits)


@fast_launch
@triton.jit(
    do_not_specialize=["rows", "width"],
    do_not_specialize_on_alignment=[
        "tokens", "faults", "next_drafts", "ends", "slots", "length", "last", "drawn", "recent", "counts",
    ],
)  # fmt: skip
def _verify_drafts(
    tokens, faults, next_drafts, ends, slots, rows, length, last, drawn, recent, width, counts,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Verify with a lane for each row, which goes on as long as the sampled token is the draft behind it."""
    release_dependents(OVERLAP)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    wait_for_inputs(OVERLAP)
    first = tl.load(ends + row - 1, inside & (row > 0), 0)
    end = tl.load(ends + row, inside, 0)
    inside = inside & (end > first)
    place, goes_on = first, inside
    for _ in range(width - 1):
        token, draft = tl.load(tokens + place, goes_on, 0), tl.load(next_drafts + place, goes_on, -1)
        goes_on = goes_on & (token == draft) & (tl.load(faults + place, goes_on, 1) == 0)
        place = tl.where(goes_on, place + 1, place)
    slot, gained = tl.load(slots + first, inside, 0), place - first + 1
    tl.store(last + slot, tl.load(tokens + place, inside, 0), inside)
    tl.store(drawn + slot, tl.load(drawn + slot, inside, 0) + gained, inside)
    tl.store(length + slot, tl.load(length + slot, inside, 0) + gained - (end - first), inside)
    tl.store(counts + row, gained, inside)
    line = recent + slot * width
    for at in range(width):  # from here on nothing is read where something was written: each row gains a token
        from_line, behind = at + gained < width, first + at + gained - width
        kept = tl.load(line + at + gained, inside & from_line, 0)
        token = tl.load(tokens + behind, inside & (at + gained >= width), 0)
        tl.store(line + at, tl.where(from_line, kept, token), inside)
