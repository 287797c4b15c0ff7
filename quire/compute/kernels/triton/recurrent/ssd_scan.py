"""Selective state spaces of Mamba2: a program takes some columns of one head's state through a row's tokens.

Rows of many tokens go through in chunks (scan_chunks.py).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.state_inputs import StateRows
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch
from quire.compute.kernels.triton.recurrent.scan_chunks import scan_by_chunks
from quire.compute.kernels.triton.recurrent.softplus import softplus
from quire.compute.kernels.triton.recurrent.tiles import (
    ALL,
    CHUNK,
    FEW,
    columns_of_chunks,
    columns_of_tokens,
    precision_of,
)


def ssd_scan(
    xbc: Tensor,
    dt: Tensor,
    decay: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    rows: StateRows,
    out: Tensor,
    *,
    dt_bounds: tuple[float, float] = (0.0, math.inf),
) -> None:
    """Arguments as in reference/ssd_scan.py."""
    heads, n, p = state.shape[1:]
    assert state.is_contiguous() and out.is_contiguous() and xbc.stride(1) == dt.stride(1) == 1
    number, states = len(rows.states), triton.next_power_of_2(n)
    block = columns_of_tokens(p, states)
    groups = (xbc.shape[1] - heads * p) // (2 * n)
    if not number:
        return
    overlap, by_chunks = can_overlap(xbc.device), len(xbc) > number
    tensors = (
        xbc, xbc.stride(0), dt, dt.stride(0), decay, skip, dt_bias, *dt_bounds, state, rows.states, rows.starts, out,
        FEW if by_chunks else ALL,
    )  # fmt: skip
    shared = {"HEADS": heads, "GROUPS": groups, "N": n, "P": p, "OVERLAP": overlap, "launch_pdl": overlap}
    _scan[(number, heads, cdiv(p, block))](*tensors, STATES=states, BLOCK=block, num_warps=4, **shared)
    if by_chunks:
        block, precision = columns_of_chunks(p), precision_of(xbc.dtype)
        scan_by_chunks[(number, heads, cdiv(p, block))](
            *tensors, STATES=max(16, states), BLOCK=block, CHUNK=CHUNK, PRECISION=precision, num_warps=8, **shared
        )


@fast_launch
@triton.jit
def _scan(
    xbc, stride, dt, dt_stride, decay, skip, dt_bias, least, largest, state, states, starts, out, most,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, STATES: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Take columns of a head's state [n, p] through the tokens of a row that has at most `most`."""
    release_dependents(OVERLAP)
    row, head = tl.program_id(0), tl.program_id(1)
    c, j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATES)
    is_column, is_state = c < P, j < N
    mask = is_state[:, None] & is_column[None, :]
    factor, added, kept = tl.load(decay + head), tl.load(dt_bias + head), tl.load(skip + head)
    of_group = HEADS * P + head // (HEADS // GROUPS) * N + j
    wait_for_inputs(OVERLAP)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    if end - start > most:
        return
    own = state + (tl.load(states + row) * HEADS + head) * N * P + j[:, None] * P + c[None, :]
    s = tl.load(own, mask, 0.0)
    for token in range(start, end):
        at = xbc + token * stride
        x = tl.load(at + head * P + c, is_column, 0.0).to(tl.float32)
        b = tl.load(at + of_group, is_state, 0.0).to(tl.float32)
        read = tl.load(at + GROUPS * N + of_group, is_state, 0.0).to(tl.float32)
        step = softplus(tl.load(dt + token * dt_stride + head).to(tl.float32) + added)
        step = tl.minimum(tl.maximum(step, least), largest)
        s = s * tl.exp(step * factor) + b[:, None] * (step * x)[None, :]
        y = tl.sum(s * read[:, None], 0) + kept * x
        tl.store(out + (token * HEADS + head) * P + c, y.to(out.dtype.element_ty), is_column)
    tl.store(own, s, mask)
