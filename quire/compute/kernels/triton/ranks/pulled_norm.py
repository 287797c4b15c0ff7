"""Sums over ranks of many rows with the residual addition and norm that follow, whose time depends on bandwidth.

In a step a program takes some of its rows. It copies them to the next place of its ring in its own window and tells the
same program of all other ranks that they are there; then it waits until theirs are, and reads them. While those are on
their way it copies its rows of the next step, so that the link is never idle. All ranks add in the order of ranks, in
fp32, so all have the same bits.

A rank writes step n when all others have said that step n - 1 is there; a rank that says so has read step n - 3, whose
norm came before. So of a ring of four places none is written that is still read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.quantized_rows import LARGEST, SMALLEST
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, next_power_of_2
from quire.compute.kernels.triton.ranks.flags import release, wait_for
from quire.compute.kernels.triton.ranks.norm_rows import added_to, block_of, store_normed, words_at, words_of
from quire.compute.kernels.triton.ranks.pushed import add_words, joined
from quire.compute.kernels.triton.ranks.window import MAX_POLLS, MAX_RANKS, PULLED_PROGRAMS, STEP_BYTES, STEPS

WARPS = 16


def rms_norm_pulled(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None, delta: Tensor, windows: Tensor,
    counts: Tensor, row_flags: int, rings: int, rank: int, ranks: int,
) -> None:  # fmt: skip
    """Compute `rms_norm` with a delta that is the sum over all ranks, or with scales `rms_norm_quantized`.

    Args:
        x: [rows, width] that `serves_rows`.
        weight, eps: As in `rms_norm`.
        out: [rows, width], the norm or its codes.
        scales: [rows, 1] fp32; None: out has no codes.
        delta: [rows, width], this rank's summand.
        windows: [ranks] int64, the addresses of all ranks' windows here.
        counts: [PULLED_PROGRAMS] int32, steps of each program so far.
        row_flags, rings: Where these begin in a window, in bytes.
        rank, ranks: This rank, and the number of ranks.
    """
    rows, words = x.shape[0], words_of(x)
    assert delta.is_contiguous() and out.is_contiguous() and weight.is_contiguous()
    if not rows:
        return
    overlap, block = can_overlap(x.device), block_of(words)
    at_once = min(STEP_BYTES // (4 * block), next_power_of_2(cdiv(rows, PULLED_PROGRAMS)))
    _rms_norm_pulled[(min(cdiv(rows, at_once), PULLED_PROGRAMS),)](
        x, weight, out, scales, delta, windows, counts, rows, eps, LARGEST.get(out.dtype, 0.0), SMALLEST,
        row_flags, rings,
        RANK=rank, RANKS=ranks, ROUND=not out.is_floating_point(), WIDTH=x.shape[1],
        WORDS=words, BLOCK=block, ROWS=at_once, PLACE=STEP_BYTES // 4, PLACES=STEPS, PROGRAMS=PULLED_PROGRAMS,
        LINE=MAX_RANKS, POLLS=MAX_POLLS, OVERLAP=overlap, num_warps=WARPS, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize=["rows", "row_flags", "rings"])
def _rms_norm_pulled(
    x, weight, out, scales, delta, windows, counts, rows, eps, largest, smallest, row_flags, rings,
    RANK: tl.constexpr, RANKS: tl.constexpr, ROUND: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, PLACE: tl.constexpr, PLACES: tl.constexpr, PROGRAMS: tl.constexpr,
    LINE: tl.constexpr, POLLS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Norm ROWS rows in each of the steps program, program + PROGRAMS and so on."""
    release_dependents(OVERLAP)
    program = tl.program_id(0)
    word = tl.arange(0, BLOCK)[None, :]
    of_step = tl.arange(0, ROWS)
    weights = tl.load(words_at(weight) + word, word < WORDS, 0)
    wait_for_inputs(OVERLAP)
    dtype: tl.constexpr = x.dtype.element_ty
    delta, x = words_at(delta), words_at(x)
    done = tl.load(counts + program)
    steps = tl.cdiv(tl.cdiv(rows, ROWS) - program, PROGRAMS)
    ring = rings + program * (PLACES * PLACE * 4)
    flags = row_flags + program * (LINE * 4)
    in_place = of_step[:, None] * WORDS + word
    first: tl.constexpr = 1 if RANK == 0 else 0  # of the other ranks
    # These are read once, because a wait for a flag empties the nearest cache.
    own_window, first_window = tl.load(windows + RANK), tl.load(windows + first)
    at, inside = _words_of_step(program, rows, of_step, word, WORDS, ROWS)
    own = tl.load(delta + at, inside, 0)
    place = _place_in(own_window, ring, done, PLACE, PLACES) + in_place
    _offer(own, place, inside, windows, first_window, flags, done, RANK, RANKS)
    for step in tl.range(0, steps, num_stages=1):
        number, group = done + step, program + step * PROGRAMS
        next_at, next_inside = _words_of_step(group + PROGRAMS, rows, of_step, word, WORDS, ROWS)
        kept = tl.load(x + at, inside, 0)
        next_own = tl.load(delta + next_at, next_inside, 0)
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                wait_for(own_window + flags + rank * 4, number + 1, POLLS)
        place = _place_in(first_window, ring, number, PLACE, PLACES) + in_place
        theirs = tl.load(place, inside, 0, cache_modifier=".cg")
        if step + 1 < steps:
            place = _place_in(own_window, ring, number + 1, PLACE, PLACES) + in_place
            _offer(next_own, place, next_inside, windows, first_window, flags, number + 1, RANK, RANKS)
        low = tl.zeros((ROWS, BLOCK), tl.float32)
        high = tl.zeros((ROWS, BLOCK), tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                low, high = add_words(low, high, own, dtype)
            elif rank == first:
                low, high = add_words(low, high, theirs, dtype)
            else:
                place = _place_in(tl.load(windows + rank), ring, number, PLACE, PLACES) + in_place
                more = tl.load(place, inside, 0, cache_modifier=".cg")
                low, high = add_words(low, high, more, dtype)
        low, high, squares = added_to(kept, low, high, dtype)
        tl.store(x + at, joined(low, high, dtype), inside)
        shrink = tl.rsqrt(tl.sum(squares, 1) / WIDTH + eps)[:, None]
        row = group * ROWS + of_step
        store_normed(
            low, high, weights, shrink, out, scales, row, row < rows, at, inside, largest, smallest, dtype, ROUND, 1
        )  # fmt: skip
        own, at, inside = next_own, next_at, next_inside
    tl.debug_barrier()  # all threads have read the count
    tl.store(counts + program, done + steps)


@triton.jit
def _words_of_step(group, rows, of_step, word, WORDS: tl.constexpr, ROWS: tl.constexpr):
    """Return the places of the words of a step's rows in a tensor, and whether there are such words."""
    row = (group * ROWS + of_step)[:, None]
    return row.to(tl.int64) * WORDS + word, (row < rows) & (word < WORDS)


@triton.jit
def _offer(
    own, place, inside, windows, first_window, flags, number, RANK: tl.constexpr, RANKS: tl.constexpr
):  # fmt: skip
    """Write a step's rows to its place in this rank's ring, and tell all others."""
    first: tl.constexpr = 1 if RANK == 0 else 0
    tl.store(place, own, inside)
    tl.debug_barrier()  # all threads have written
    release(first_window + flags + RANK * 4, number + 1)
    for rank in tl.static_range(first + 1, RANKS):
        if rank != RANK:
            release(tl.load(windows + rank) + flags + RANK * 4, number + 1)


@triton.jit
def _place_in(window, ring, number, PLACE: tl.constexpr, PLACES: tl.constexpr):
    """Return the place of step `number` in a window's ring."""
    words = (window + ring).to(tl.pointer_type(tl.int32))
    return tl.multiple_of(words, 16) + (number & (PLACES - 1)) * PLACE
