"""Sums over ranks of small tensors, whose time depends on latency.

Each rank writes its words into all other windows, each word beside the number of the call in a packet of 8 bytes, which
arrives whole. A reader looks at a packet until it has the call's number, so there is no flag to wait for and no order
to keep. NCCL calls this LL. All ranks add in the order of ranks, in fp32, so all have the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch
from quire.compute.kernels.triton.ranks.window import MAX_POLLS, PUSHED_TILE, PUSHED_WORDS

WARPS = 4


def all_reduce_pushed(x: Tensor, windows: Tensor, calls: Tensor, arrivals: int, rank: int, ranks: int) -> None:
    """Replace x by its sum over all ranks.

    Args:
        x: fp32, bf16 or fp16, contiguous, of whole words of 4 bytes, PUSHED_WORDS at most.
        windows: [ranks] int64, the addresses of all ranks' windows here.
        calls: [PUSHED_PROGRAMS] int32, calls of each program so far.
        arrivals: Where packets arrive in a window, in bytes.
        rank, ranks: This rank, and the number of ranks.
    """
    words = x.numel() * x.element_size() // 4
    assert x.is_contiguous() and words <= PUSHED_WORDS
    if not words:
        return
    overlap = can_overlap(x.device)
    _all_reduce_pushed[(cdiv(words, PUSHED_TILE),)](
        x, windows, calls, words, arrivals,
        RANK=rank, RANKS=ranks, MOST=PUSHED_WORDS, TILE=PUSHED_TILE, POLLS=MAX_POLLS,
        OVERLAP=overlap, num_warps=WARPS, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize=["arrivals"])
def _all_reduce_pushed(
    x, windows, calls, words, arrivals,
    RANK: tl.constexpr, RANKS: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr, POLLS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add up TILE words: an fp32 each, or two 16-bit values."""
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    program = tl.program_id(0)
    at = program * TILE + tl.arange(0, TILE)
    inside = at < words
    dtype: tl.constexpr = x.dtype.element_ty
    x = x.to(tl.pointer_type(tl.int32), bitcast=True)
    own = tl.load(x + at, inside, 0)
    call = tl.load(calls + program) + 1
    number = call.to(tl.int64) << 32
    packets = number | (own.to(tl.int64) & 0xFFFFFFFF)
    first = (call & 1) * RANKS * MOST
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            theirs = packets_in(windows, rank, arrivals)
            tl.store(theirs + (first + RANK * MOST) + at, packets, inside)
    mine = packets_in(windows, RANK, arrivals)
    low = tl.zeros((TILE,), tl.float32)
    high = tl.zeros((TILE,), tl.float32)
    for rank in tl.static_range(RANKS):
        values = own
        if rank != RANK:
            values = arrived(mine + (first + rank * MOST) + at, inside, number, POLLS)
        low, high = add_words(low, high, values, dtype)
    tl.store(x + at, joined(low, high, dtype), inside)
    tl.debug_barrier()  # all threads have read the number
    tl.store(calls + program, call)


@triton.jit
def packets_in(windows, rank: tl.constexpr, arrivals):
    """Return where packets arrive in a rank's window."""
    return tl.multiple_of((tl.load(windows + rank) + arrivals).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def arrived(packets, inside, number, POLLS: tl.constexpr):
    """Return the words of packets, once all of them have the call's number."""
    found = tl.load(packets, inside, other=number, volatile=True)
    polls = 0
    while (tl.sum(((found >> 32) != (number >> 32)).to(tl.int32), 0) > 0) & (polls < POLLS):
        found = tl.load(packets, inside, other=number, volatile=True)
        polls += 1
    return found.to(tl.int32)


@triton.jit
def add_words(low, high, words, dtype: tl.constexpr):
    """Add the words' values to sums: fp32 to `low`, the lower and upper 16-bit values to `low` and `high`."""
    if dtype == tl.float32:
        low += words.to(tl.float32, bitcast=True)
    elif dtype == tl.float16:
        low += (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high += (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low += (words << 16).to(tl.float32, bitcast=True)
        high += (words & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def joined(low, high, dtype: tl.constexpr):
    """Return the words of sums from `add_words`."""
    if dtype == tl.float32:
        words = low.to(tl.int32, bitcast=True)
    else:
        lower = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        upper = high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
        words = lower | upper
    return words
