"""Hands residual streams from a pipeline stage to the next one, and sampled tokens from the last stage to the first.

They are written into the other card's memory, and awaited there on the device (stage_window.py). Graphs record the
steps that send and receive streams, so the step's number is read on the device. Number 0 is no step: nothing is written
or awaited for it, and what is received is undefined.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch
from quire.compute.kernels.triton.ranks.flags import release, wait_for
from quire.compute.kernels.triton.ranks.stage_window import STREAM_PROGRAMS, TILE_WORDS, StageLayout
from quire.compute.kernels.triton.ranks.window import MAX_POLLS

_STREAM_WARPS = 16
_TOKEN_WARPS = 4
_TOKENS = 1_024
"""Slots whose tokens are copied at once."""


def send_stream(x: Tensor, delta: Tensor, windows: Tensor, step: Tensor, layout: StageLayout) -> None:
    """Write a stream into the next stage's window.

    Args:
        x, delta: [tokens, hidden] fp32, bf16 or fp16, contiguous, of whole words of 4 bytes.
        windows: [2] int64, the addresses of this rank's window and of the window that it writes to.
        step: [1] int64, the step's number.
        layout: The layout of the other window.
    """
    _copy_stream(_send_stream, x, delta, windows, step, layout)


def receive_stream(x: Tensor, delta: Tensor, windows: Tensor, step: Tensor, layout: StageLayout) -> None:
    """Wait for a stream in this rank's window, and copy it into x and delta.

    Arguments are those of `send_stream`, but the layout is that of this window. Rows of x behind those that were sent
    are undefined.
    """
    _copy_stream(_receive_stream, x, delta, windows, step, layout)


def send_tokens(last: Tensor, windows: Tensor, step: int, layout: StageLayout) -> None:
    """Write the tokens `last` [slots] int64, which slots have sampled last, into the other rank's window. The step that
    has sampled is `step`, 0 for none; other arguments are those of `send_stream`."""
    _launch_tokens(_send_tokens, last, windows, step, layout)


def take_tokens(last: Tensor, windows: Tensor, step: int, layout: StageLayout) -> None:
    """Wait until the tokens of a step are in this rank's window, and copy the tokens of all slots into `last`.

    Tokens of later steps may be among them: the first stage reads a slot's token before the slot samples the next.
    """
    _launch_tokens(_take_tokens, last, windows, step, layout)


def _copy_stream(kernel: object, x: Tensor, delta: Tensor, windows: Tensor, step: Tensor, layout: StageLayout) -> None:
    words = x.numel() * x.element_size() // 4
    assert x.is_contiguous() and delta.is_contiguous() and x.shape == delta.shape and x.dtype == delta.dtype
    assert words <= layout.words and not x.numel() * x.element_size() % 4
    overlap = can_overlap(x.device)
    kernel[(STREAM_PROGRAMS,)](  # type: ignore[index]
        x, delta, windows, step, cdiv(words, TILE_WORDS), words, layout.flags, layout.streams,
        STEPS=layout.steps, MOST=layout.words, TILE=TILE_WORDS, PROGRAMS=STREAM_PROGRAMS, POLLS=MAX_POLLS,
        OVERLAP=overlap, num_warps=_STREAM_WARPS, launch_pdl=overlap,
    )  # fmt: skip


def _launch_tokens(kernel: object, last: Tensor, windows: Tensor, step: int, layout: StageLayout) -> None:
    assert last.is_contiguous()
    overlap = can_overlap(last.device)
    number = (step + 2**31) % 2**32 - 2**31
    kernel[(1,)](  # type: ignore[index]
        last, windows, number, int(step > 0), len(last), layout.tokens,
        BLOCK=_TOKENS, POLLS=MAX_POLLS, OVERLAP=overlap, num_warps=_TOKEN_WARPS, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize=["tiles", "flags", "streams"], do_not_specialize_on_alignment=["step"])
def _send_stream(
    x, delta, windows, step, tiles, words, flags, streams,
    STEPS: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr, POLLS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Send the tiles program, program + PROGRAMS and so on, of TILE words.

    A program without tiles sets its flag too, since a receiver may expect more rows.
    """
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    program = tl.program_id(0)
    number = tl.load(step)
    x = x.to(tl.pointer_type(tl.int32), bitcast=True)
    delta = delta.to(tl.pointer_type(tl.int32), bitcast=True)
    if number > 0:
        window = tl.load(windows + 1)
        theirs = _stream_in(window, streams, number, STEPS, MOST)
        for tile in tl.range(program, tiles, PROGRAMS):
            at = tile * TILE + tl.arange(0, TILE)
            inside = at < words
            tl.store(theirs + at, tl.load(x + at, inside, 0), inside)
            tl.store(theirs + MOST + at, tl.load(delta + at, inside, 0), inside)
        tl.debug_barrier()  # all threads have written
        release(window + flags + program * 4, number.to(tl.int32))


@fast_launch
@triton.jit(do_not_specialize=["tiles", "flags", "streams"], do_not_specialize_on_alignment=["step"])
def _receive_stream(
    x, delta, windows, step, tiles, words, flags, streams,
    STEPS: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr, POLLS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    program = tl.program_id(0)
    number = tl.load(step)
    window = tl.load(windows)
    if number > 0:
        wait_for(window + flags + program * 4, number.to(tl.int32), POLLS)
    tl.debug_barrier()
    mine = _stream_in(window, streams, number, STEPS, MOST)
    x = x.to(tl.pointer_type(tl.int32), bitcast=True)
    delta = delta.to(tl.pointer_type(tl.int32), bitcast=True)
    for tile in tl.range(program, tiles, PROGRAMS):
        at = tile * TILE + tl.arange(0, TILE)
        inside = at < words
        tl.store(x + at, tl.load(mine + at, inside, 0, cache_modifier=".cg"), inside)
        tl.store(delta + at, tl.load(mine + MOST + at, inside, 0, cache_modifier=".cg"), inside)


@fast_launch
@triton.jit(do_not_specialize=["number", "is_step", "slots", "tokens"])
def _send_tokens(
    last, windows, number, is_step, slots, tokens, BLOCK: tl.constexpr, POLLS: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    if is_step:
        window = tl.load(windows + 1)
        theirs = (window + tokens).to(tl.pointer_type(tl.int64))
        for begin in tl.range(0, slots, BLOCK):
            slot = begin + tl.arange(0, BLOCK)
            tl.store(theirs + slot, tl.load(last + slot, slot < slots, 0), slot < slots)
        tl.debug_barrier()  # all threads have written
        release(window, number)


@fast_launch
@triton.jit(do_not_specialize=["number", "is_step", "slots", "tokens"])
def _take_tokens(
    last, windows, number, is_step, slots, tokens, BLOCK: tl.constexpr, POLLS: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    if is_step:
        window = tl.load(windows)
        wait_for(window, number, POLLS)
        tl.debug_barrier()
        mine = (window + tokens).to(tl.pointer_type(tl.int64))
        for begin in tl.range(0, slots, BLOCK):
            slot = begin + tl.arange(0, BLOCK)
            found = tl.load(mine + slot, slot < slots, 0, cache_modifier=".cg")
            tl.store(last + slot, found, slot < slots)


@triton.jit
def _stream_in(window, streams, number, STEPS: tl.constexpr, MOST: tl.constexpr):
    """Return where a step's x begins in a window; its delta begins MOST words behind."""
    first = tl.multiple_of((window + streams).to(tl.pointer_type(tl.int32)), 16)
    return first + tl.multiple_of(number % STEPS * (2 * MOST), 16)
