"""What a step begins with: the embeddings of its tokens and the angles of their positions.

An embedding reads and writes its row, 16 bytes a thread. Angles write a number for each turning dimension and read next
to nothing; sines and cosines are the precise ones, whose arguments are reduced exactly even at 100,000 radians.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, next_power_of_2

_BLOCK = 1_024
_TOKENS = 8
"""Tokens whose angles one program computes."""
_WARPS = 4


def embed(tokens: Tensor, weight: Tensor, scale: float | None, out: Tensor) -> None:
    assert weight.is_contiguous() and out.is_contiguous()
    if not len(tokens):
        return
    width, overlap = weight.shape[1], can_overlap(weight.device)
    parts = cdiv(width, _BLOCK)
    _embed[(len(tokens) * parts,)](
        tokens, weight, scale, out, WIDTH=width, PARTS=parts, BLOCK=_BLOCK, OVERLAP=overlap, num_warps=_WARPS,
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
