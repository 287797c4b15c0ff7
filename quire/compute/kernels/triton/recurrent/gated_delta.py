"""The gated delta rule: a program takes some columns of one head's state through a row's tokens.

Rows of many tokens go through in chunks (delta_chunks.py).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.gated_delta import EPS
from quire.compute.kernels.reference.state_inputs import StateRows
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch
from quire.compute.kernels.triton.recurrent.delta_chunks import rule_by_chunks, solve_chunks
from quire.compute.kernels.triton.recurrent.softplus import softplus
from quire.compute.kernels.triton.recurrent.tiles import (
    ALL,
    CHUNK,
    FEW,
    columns_of_chunks,
    columns_of_tokens,
    precision_of,
)


def gated_delta(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    decay: Tensor,
    a_bias: Tensor,
    state: Tensor,
    rows: StateRows,
    out: Tensor,
    *,
    factor: float = 1.0,
    bound: float | None = None,
) -> None:
    """Arguments as in reference/gated_delta.py, without factors of β and bounds, which only CPUs serve."""
    if factor != 1.0 or bound is not None:
        raise NotImplementedError("The gated delta rule with a factor of β, or with a bound, runs on a CPU only.")
    values, dk, dv = state.shape[1:]
    assert state.is_contiguous() and out.is_contiguous() and qkv.stride(1) == a.stride(1) == b.stride(1) == 1
    number, width = len(rows.states), triton.next_power_of_2(dk)
    block = columns_of_tokens(dv, width)
    if not number:
        return
    overlap, each = can_overlap(qkv.device), a_bias.numel() // values
    by_chunks = len(qkv) > number and each == 1
    inputs = qkv, qkv.stride(0), a, a.stride(0), b, b.stride(0), decay, a_bias
    keys, most = (qkv.shape[1] - values * dv) // (2 * dk), FEW if by_chunks else ALL
    shared: dict[str, Any] = {"KEYS": keys, "VALUES": values, "DK": dk, "DV": dv, "OVERLAP": overlap}
    shared["launch_pdl"] = overlap
    _rule[(number, values, cdiv(dv, block))](
        *inputs, state, rows.states, rows.starts, out, dk**-0.5, EPS, most, EACH=each, WIDTH=width, BLOCK=block,
        num_warps=4, **shared,
    )  # fmt: skip
    if by_chunks:
        block, chunks = columns_of_chunks(dv), cdiv(len(qkv), CHUNK) + number
        shared |= {"WIDTH": max(16, width), "CHUNK": CHUNK, "PRECISION": precision_of(qkv.dtype)}
        solved = torch.empty((chunks, values, CHUNK, CHUNK), dtype=torch.float32, device=qkv.device)
        solve_chunks[(chunks, values)](
            *inputs, rows.starts, solved, number, EPS, most, ROWS=triton.next_power_of_2(number), num_warps=4, **shared
        )
        rule_by_chunks[(number, values, cdiv(dv, block))](
            *inputs, state, rows.states, rows.starts, out, solved, dk**-0.5, EPS, most, BLOCK=block, num_warps=8,
            **shared,
        )  # fmt: skip


@fast_launch
@triton.jit
def _rule(
    qkv, stride, a, a_stride, b, b_stride, decay, a_bias, state, states, starts, out, scale, eps,
    most,
    KEYS: tl.constexpr, VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, EACH: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Take columns of a head's state [dk, dv] through the tokens of a row that has at most `most`."""
    release_dependents(OVERLAP)
    row, head = tl.program_id(0), tl.program_id(1)
    c, j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    is_column, is_key = c < DV, j < DK
    mask = is_key[:, None] & is_column[None, :]
    factor, shared = tl.load(decay + head), head // (VALUES // KEYS)
    each = head * EACH + (j if EACH > 1 else tl.zeros_like(j))
    added = tl.load(a_bias + each, is_key, 0.0)
    wait_for_inputs(OVERLAP)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    if end - start > most:
        return
    own = state + (tl.load(states + row) * VALUES + head) * DK * DV + j[:, None] * DV + c[None, :]
    s = tl.load(own, mask, 0.0)
    for token in range(start, end):
        at = qkv + token * stride
        q = tl.load(at + shared * DK + j, is_key, 0.0).to(tl.float32)
        k = tl.load(at + (KEYS + shared) * DK + j, is_key, 0.0).to(tl.float32)
        v = tl.load(at + 2 * KEYS * DK + head * DV + c, is_column, 0.0).to(tl.float32)
        q *= scale / tl.sqrt(tl.sum(q * q, 0) + eps)
        k /= tl.sqrt(tl.sum(k * k, 0) + eps)
        gate = softplus(tl.load(a + token * a_stride + each, is_key, 0.0).to(tl.float32) + added)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b + token * b_stride + head).to(tl.float32)))
        s *= tl.exp(factor * gate)[:, None]
        change = beta * (v - tl.sum(s * k[:, None], 0))
        s += k[:, None] * change[None, :]
        y = tl.sum(s * q[:, None], 0)
        tl.store(out + (token * VALUES + head) * DV + c, y.to(out.dtype.element_ty), is_column)
    tl.store(own, s, mask)
