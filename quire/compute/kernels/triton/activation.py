"""The activations of MLPs, and the bound of logits: element by element, one pass over memory.

A gated activation moves 3 elements for each of its outputs, a plain one 2. A program takes a part of one row, eight
elements a thread: these are 16 bytes of bf16, and a single row still keeps many multiprocessors reading.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch

BLOCK, WARPS = 1_024, 4
"""Elements and warps of a program, as tuning/h200/tune_small.py measured them."""


def silu_and_mul(x: Tensor, out: Tensor) -> None:
    _launch(_gated, x, out, out, ACTIVATION="silu")


def gelu_and_mul(x: Tensor, out: Tensor) -> None:
    _launch(_gated, x, out, out, ACTIVATION="gelu")


def gelu(x: Tensor, out: Tensor) -> None:
    _launch(_gelu, x, out, out)


def soft_cap(x: Tensor, cap: float) -> None:
    _launch(_soft_cap, x, cap, x)


def _launch(kernel: Any, x: Tensor, other: Tensor | float, whole: Tensor, **constants: str) -> None:
    """Launch a kernel of x and `other`, with programs that each take a part of a row of `whole`."""
    assert x.is_contiguous() and whole.is_contiguous()
    width = whole.shape[-1]
    if rows := whole.numel() // width:
        overlap = can_overlap(x.device)
        kernel[(rows * cdiv(width, BLOCK),)](
            x, other, **constants, WIDTH=width, BLOCK=BLOCK, OVERLAP=overlap, num_warps=WARPS, launch_pdl=overlap
        )


@fast_launch
@triton.jit
def _gated(
    x, out,
    ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    row, column = _place(WIDTH, BLOCK)
    inside = column < WIDTH
    wait_for_inputs(OVERLAP)
    gate = tl.load(x + row * (2 * WIDTH) + column, inside, 0.0)
    up = tl.load(x + row * (2 * WIDTH) + WIDTH + column, inside, 0.0)
    if ACTIVATION == "silu":
        gated = gated_silu(gate, up)
    else:
        gated = (tanh_gelu(gate.to(tl.float32)).to(gate.dtype).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out + row * WIDTH + column, gated, inside)


@fast_launch
@triton.jit
def _gelu(x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    release_dependents(OVERLAP)
    row, column = _place(WIDTH, BLOCK)
    inside = column < WIDTH
    wait_for_inputs(OVERLAP)
    values = tl.load(x + row * WIDTH + column, inside, 0.0)
    tl.store(out + row * WIDTH + column, tanh_gelu(values.to(tl.float32)).to(values.dtype), inside)


@fast_launch
@triton.jit
def _soft_cap(x, cap, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    release_dependents(OVERLAP)
    row, column = _place(WIDTH, BLOCK)
    inside = column < WIDTH
    wait_for_inputs(OVERLAP)
    values = tl.load(x + row * WIDTH + column, inside, 0.0)
    shares = (values.to(tl.float32) / cap).to(values.dtype)
    bounded = tanh(shares.to(tl.float32)).to(values.dtype)
    tl.store(x + row * WIDTH + column, (bounded.to(tl.float32) * cap).to(values.dtype), inside)


@triton.jit
def _place(WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return a program's row, int64, and its columns [BLOCK]; neighbouring programs take the parts of a row."""
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    return row.to(tl.int64), part * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def gated_silu(gate, up):
    """Return silu(gate) · up; silu(gate) and the product are rounded to the dtype of gate."""
    wide = gate.to(tl.float32)
    activated = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    return (activated * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def tanh_gelu(x):
    """Return gelu in its tanh form, of fp32: x (1 + tanh z) / 2 is x · sigmoid(2 z)."""
    z = 0.7978845608028654 * (x + 0.044715 * x * x * x)  # sqrt(2 / pi)
    return x * tl.sigmoid(2 * z)


@triton.jit
def tanh(x):
    """Return tanh of fp32 to 1e-6 of its value: by exponentials, and near 0, where their difference is inexact, by the
    fifth convergent of its continued fraction x / (1 + x² / (3 + x² / (5 + …))) (Lambert 1768).
    """
    s = x * x
    near = x * (945 + s * (105 + s)) / (945 + s * (420 + 15 * s))
    far = 1 - 2 / (tl.exp(2 * tl.abs(x)) + 1)
    return tl.where(s < 1, near, tl.where(x < 0, -far, far))
