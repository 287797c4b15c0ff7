"""The gated delta rule for rows of many tokens, a chunk at a time.

Within a chunk, the changes of the state are a triangular system of the keys, which is solved row by row: powers
of its matrix grow too large where keys repeat (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta
Rule", section 3). No chunk's system needs the state, so all are solved at once, before states go from chunk to chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.compute.kernels.triton.launching.dependent_launch import release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import fast_launch
from quire.compute.kernels.triton.recurrent.softplus import softplus


@triton.jit
def _inverse(a, CHUNK: tl.constexpr):
    """(I + a)⁻¹ of a strictly lower triangular matrix [CHUNK, CHUNK]."""
    i = tl.arange(0, CHUNK)
    inverse = (i[:, None] == i[None, :]).to(tl.float32)
    for row in range(1, CHUNK):
        own = tl.sum(tl.where(i[:, None] == row, a, 0.0), 0)
        known = tl.sum(own[:, None] * inverse, 0)
        inverse = tl.where(i[:, None] == row, inverse - known[None, :], inverse)
    return inverse


@triton.jit
def _gates(a, b, token, live, head, a_stride, b_stride, factor, added):
    """Logarithms of what each token keeps of the state, and β; 0 behind the row's end."""
    gate = factor * softplus(tl.load(a + token * a_stride + head, live, 0.0).to(tl.float32) + added)
    beta = 1.0 / (1.0 + tl.exp(-tl.load(b + token * b_stride + head, live, 0.0).to(tl.float32)))
    return tl.where(live, gate, 0.0), tl.where(live, beta, 0.0)


@triton.jit
def _kept(total, CHUNK: tl.constexpr):
    """What is kept between each token and each one before it: [CHUNK, CHUNK]."""
    i = tl.arange(0, CHUNK)
    return tl.exp(tl.where(i[:, None] >= i[None, :], total[:, None] - total[None, :], float("-inf")))


@fast_launch
@triton.jit
def solve_chunks(
    qkv, stride, a, a_stride, b, b_stride, decay, a_bias, starts, solved, number, eps, most,
    KEYS: tl.constexpr, VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Solve the system of a chunk and a head, for rows that have more than `most` tokens.

    Chunk n of a row that begins at token `start` is number start // CHUNK + row + n, of which no two are equal.
    `solved` is [chunks, VALUES, CHUNK, CHUNK].
    """
    release_dependents(OVERLAP)
    chunk, head = tl.program_id(0), tl.program_id(1)
    j, i, each = tl.arange(0, WIDTH), tl.arange(0, CHUNK), tl.arange(0, ROWS)
    factor, added, shared = tl.load(decay + head), tl.load(a_bias + head), head // (VALUES // KEYS)
    wait_for_inputs(OVERLAP)
    before = tl.load(starts + each, each < number, 1 << 62) // CHUNK + each
    row = tl.sum((before <= chunk).to(tl.int32), 0) - 1
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    first = start + (chunk - start // CHUNK - row) * CHUNK
    if (end - start <= most) | (first >= end):
        return
    token = first + i
    live = token < end
    of_keys = live[:, None] & (j < DK)[None, :]
    k = tl.load(qkv + token[:, None] * stride + ((KEYS + shared) * DK + j)[None, :], of_keys, 0.0).to(tl.float32)
    k /= tl.sqrt(tl.sum(k * k, 1) + eps)[:, None]
    gate, beta = _gates(a, b, token, live, head, a_stride, b_stride, factor, added)
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * _kept(tl.cumsum(gate, 0), CHUNK) * beta[:, None]
    inverse = _inverse(tl.where(i[:, None] > i[None, :], system, 0.0), CHUNK)
    at = solved + (chunk.to(tl.int64) * VALUES + head) * CHUNK * CHUNK
    tl.store(at + i[:, None] * CHUNK + i[None, :], inverse)


@fast_launch
@triton.jit
def rule_by_chunks(
    qkv, stride, a, a_stride, b, b_stride, decay, a_bias, state, states, starts, out, solved, scale, eps, most,
    KEYS: tl.constexpr, VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Take columns of a head's state [dk, dv] through the tokens of a row that has more than `most`, whose systems
    are solved."""
    release_dependents(OVERLAP)
    row, head = tl.program_id(0), tl.program_id(1)
    c, j, i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH), tl.arange(0, CHUNK)
    is_column, is_key = c < DV, j < DK
    mask = is_key[:, None] & is_column[None, :]
    factor, added, shared = tl.load(decay + head), tl.load(a_bias + head), head // (VALUES // KEYS)
    wait_for_inputs(OVERLAP)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    if end - start <= most:
        return
    own = state + (tl.load(states + row) * VALUES + head) * DK * DV + j[:, None] * DV + c[None, :]
    s = tl.load(own, mask, 0.0)
    for first in range(start, end, CHUNK):
        token = first + i
        live = token < end
        at, of_keys = qkv + token[:, None] * stride, live[:, None] & is_key[None, :]
        q = tl.load(at + (shared * DK + j)[None, :], of_keys, 0.0).to(tl.float32)
        k = tl.load(at + ((KEYS + shared) * DK + j)[None, :], of_keys, 0.0).to(tl.float32)
        v = tl.load(at + (2 * KEYS * DK + head * DV + c)[None, :], live[:, None] & is_column[None, :], 0.0)
        q *= (scale / tl.sqrt(tl.sum(q * q, 1) + eps))[:, None]
        k /= tl.sqrt(tl.sum(k * k, 1) + eps)[:, None]
        gate, beta = _gates(a, b, token, live, head, a_stride, b_stride, factor, added)
        total = tl.cumsum(gate, 0)
        last = tl.sum(gate, 0)
        chunk = start // CHUNK + row + (first - start) // CHUNK
        at_solved = solved + (chunk * VALUES + head) * CHUNK * CHUNK
        inverse = tl.load(at_solved + i[:, None] * CHUNK + i[None, :])
        known = tl.dot(k * tl.exp(total)[:, None], s, input_precision=PRECISION)
        change = tl.dot(inverse, beta[:, None] * (v.to(tl.float32) - known), input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * _kept(total, CHUNK)
        y = tl.dot(q * tl.exp(total)[:, None], s, input_precision=PRECISION)
        y = tl.dot(scores, change, y, input_precision=PRECISION)
        of_columns = live[:, None] & is_column[None, :]
        tl.store(out + (token[:, None] * VALUES + head) * DV + c[None, :], y.to(out.dtype.element_ty), of_columns)
        later = tl.trans(k * tl.exp(last - total)[:, None])
        s = tl.dot(later, change, s * tl.exp(last), input_precision=PRECISION)
    tl.store(own, s, mask)
