"""Sums over ranks of few rows with the residual addition and norm that follow, by packets as in `pushed.py`.

A program has a row, which takes whole tiles of arrivals. The places and numbers of its packets are those of the
programs of `pushed.py` that the tiles belong to, for each of which this program counts a call.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.quantized_rows import LARGEST, SMALLEST
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, next_power_of_2
from quire.compute.kernels.triton.ranks.norm_rows import added_to, block_of, store_normed, words_at, words_of
from quire.compute.kernels.triton.ranks.pushed import add_words, arrived, joined, packets_in
from quire.compute.kernels.triton.ranks.window import MAX_POLLS, PUSHED_PROGRAMS, PUSHED_TILE, PUSHED_WORDS

PER_THREAD = 4
"""Words of a thread, up to 1,024 threads, or 512 among many ranks, whose packets take more registers."""
FEW_RANKS = 4


def can_push_rows(x: Tensor) -> bool:
    """Whether arrivals have room for the rows of x."""
    return x.shape[0] * cdiv(words_of(x), PUSHED_TILE) <= PUSHED_PROGRAMS


def rms_norm_pushed(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None, delta: Tensor, windows: Tensor,
    calls: Tensor, arrivals: int, rank: int, ranks: int,
) -> None:  # fmt: skip
    """Compute `rms_norm` with a delta that is the sum over all ranks, or with scales `rms_norm_quantized`.

    Args:
        x: [rows, width] that `serves_rows` and `can_push_rows`.
        weight, eps, out, scales, delta: As in `rms_norm_pulled`.
        windows, calls, arrivals, rank, ranks: As in `all_reduce_pushed`, with whose calls these are counted.
    """
    rows, words = x.shape[0], words_of(x)
    assert delta.is_contiguous() and out.is_contiguous() and weight.is_contiguous() and can_push_rows(x)
    if not rows:
        return
    overlap, block, tiles = can_overlap(x.device), block_of(words), cdiv(words, PUSHED_TILE)
    most = 32 if ranks <= FEW_RANKS else 16
    _rms_norm_pushed[(rows,)](
        x, weight, out, scales, delta, windows, calls, eps, LARGEST.get(out.dtype, 0.0), SMALLEST, arrivals,
        RANK=rank, RANKS=ranks, ROUND=not out.is_floating_point(), WIDTH=x.shape[1],
        WORDS=words, BLOCK=block, MOST=PUSHED_WORDS, TILE=PUSHED_TILE, TILES=tiles, SPAN=next_power_of_2(tiles),
        POLLS=MAX_POLLS, OVERLAP=overlap, num_warps=min(most, max(1, block // (32 * PER_THREAD))), launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize=["arrivals"])
def _rms_norm_pushed(
    x, weight, out, scales, delta, windows, calls, eps, largest, smallest, arrivals,
    RANK: tl.constexpr, RANKS: tl.constexpr, ROUND: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, SPAN: tl.constexpr,
    POLLS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Norm a row, whose words are an fp32 each or two 16-bit values."""
    release_dependents(OVERLAP)
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0)
    # Packets of two words are a vector of 16 bytes: words taken two by two need not change threads for that.
    word = tl.max_contiguous(tl.arange(0, BLOCK), 2)
    inside = word < WORDS
    weights = tl.load(words_at(weight) + word, inside, 0)
    wait_for_inputs(OVERLAP)
    at = row * WORDS + word
    own = tl.load(words_at(delta) + at, inside, 0)
    tile = tl.arange(0, SPAN)
    own_calls = calls + row * TILES
    counts = tl.load(own_calls + tile, tile < TILES, 0) + 1
    call = tl.load(own_calls + word // TILE, word < TILES * TILE, 0) + 1
    call = tl.max_constancy(call, TILE if TILE < BLOCK else BLOCK)
    number = call.to(tl.int64) << 32
    packets = number | (own.to(tl.int64) & 0xFFFFFFFF)
    place = (call & 1) * (RANKS * MOST) + row * (TILES * TILE) + word
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            tl.store(packets_in(windows, rank, arrivals) + RANK * MOST + place, packets, inside)
    kept = tl.load(words_at(x) + at, inside, 0)
    mine = packets_in(windows, RANK, arrivals)
    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(RANKS):
        values = own
        if rank != RANK:
            values = arrived(mine + rank * MOST + place, inside, number, POLLS)
        low, high = add_words(low, high, values, dtype)
    tl.debug_barrier()  # all threads have read the numbers
    tl.store(own_calls + tile, counts, tile < TILES)
    low, high, squares = added_to(kept, low, high, dtype)
    tl.store(words_at(x) + at, joined(low, high, dtype), inside)
    shrink = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
    store_normed(
        low, high, weights, shrink, out, scales, row, True, at, inside, largest, smallest, dtype, ROUND, None
    )  # fmt: skip
