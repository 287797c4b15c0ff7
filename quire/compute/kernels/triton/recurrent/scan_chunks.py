"""Selective state spaces of Mamba2 for rows of many tokens, a chunk at a time (Dao & Gu 2024, section 6)."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.compute.kernels.triton.launching.dependent_launch import release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import fast_launch
from quire.compute.kernels.triton.recurrent.softplus import softplus


@fast_launch
@triton.jit
def scan_by_chunks(
    xbc, stride, dt, dt_stride, decay, skip, dt_bias, least, largest, state, states, starts, out, most,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, STATES: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Take columns of a head's state [n, p] through the tokens of a row that has more than `most`."""
    release_dependents(OVERLAP)
    row, head = tl.program_id(0), tl.program_id(1)
    c, j, i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATES), tl.arange(0, CHUNK)
    is_column, is_state = c < P, j < N
    mask = is_state[:, None] & is_column[None, :]
    factor, added, through = tl.load(decay + head), tl.load(dt_bias + head), tl.load(skip + head)
    of_group = HEADS * P + head // (HEADS // GROUPS) * N + j
    wait_for_inputs(OVERLAP)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    if end - start <= most:
        return
    own = state + (tl.load(states + row) * HEADS + head) * N * P + j[:, None] * P + c[None, :]
    s = tl.load(own, mask, 0.0)
    for first in range(start, end, CHUNK):
        token = first + i
        live = token < end
        at, of_states = xbc + token[:, None] * stride, live[:, None] & is_state[None, :]
        of_columns = live[:, None] & is_column[None, :]
        x = tl.load(at + (head * P + c)[None, :], of_columns, 0.0).to(tl.float32)
        b = tl.load(at + of_group[None, :], of_states, 0.0).to(tl.float32)
        read = tl.load(at + (GROUPS * N + of_group)[None, :], of_states, 0.0).to(tl.float32)
        step = softplus(tl.load(dt + token * dt_stride + head, live, 0.0).to(tl.float32) + added)
        step = tl.where(live, tl.minimum(tl.maximum(step, least), largest), 0.0)
        total = tl.cumsum(step * factor, 0)
        last = tl.sum(step * factor, 0)
        kept = tl.exp(tl.where(i[:, None] >= i[None, :], total[:, None] - total[None, :], float("-inf")))
        inputs = x * step[:, None]
        scores = tl.dot(read, tl.trans(b), input_precision=PRECISION) * kept
        y = tl.dot(read * tl.exp(total)[:, None], s, input_precision=PRECISION)
        y = tl.dot(scores, inputs, y, input_precision=PRECISION) + through * x
        tl.store(out + (token[:, None] * HEADS + head) * P + c[None, :], y.to(out.dtype.element_ty), of_columns)
        later = tl.trans(b * tl.exp(last - total)[:, None])
        s = tl.dot(later, inputs, s * tl.exp(last), input_precision=PRECISION)
    tl.store(own, s, mask)
