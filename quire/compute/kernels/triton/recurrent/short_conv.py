"""Causal convolution of each channel over a few tokens.

If a step has as many tokens as rows, a program takes a row; otherwise, a block of tokens of any rows, and a second
kernel moves the states on.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.state_inputs import StateRows
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch

_CHANNELS = 256
_TOKENS, _CHANNELS_OF_TOKENS = 16, 64


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    rows: StateRows,
    out: Tensor,
    *,
    silu: bool,
    before: Tensor | None = None,
    after: Tensor | None = None,
) -> None:
    """Arguments as in reference/short_conv.py; rows of x, before and after have one stride."""
    (tokens, channels), k, number = x.shape, len(weight), len(rows.states)
    assert weight.is_contiguous() and state.is_contiguous() and x.stride(1) == out.stride(1) == 1
    assert all(each is None or each.stride() == x.stride() for each in (before, after))
    if not tokens:
        return
    overlap = can_overlap(x.device)
    shared = {"K": k, "SILU": silu, "OVERLAP": overlap, "num_warps": 4, "launch_pdl": overlap}
    if tokens == number:
        _of_rows[(number, cdiv(channels, _CHANNELS))](
            x, before, after, x.stride(0), weight, bias, state, rows.states, rows.starts, out, out.stride(0), channels,
            BLOCK=_CHANNELS, **shared,
        )  # fmt: skip
        return
    _of_tokens[(cdiv(tokens, _TOKENS), cdiv(channels, _CHANNELS_OF_TOKENS))](
        x, before, after, x.stride(0), weight, bias, state, rows.states, rows.starts, out, out.stride(0), channels,
        tokens, number, ROWS=triton.next_power_of_2(number), TOKENS=_TOKENS, BLOCK=_CHANNELS_OF_TOKENS, **shared,
    )  # fmt: skip
    del shared["SILU"]
    _move_states[(number, cdiv(channels, _CHANNELS))](
        x, before, x.stride(0), state, rows.states, rows.starts, channels, BLOCK=_CHANNELS, **shared
    )


@triton.jit
def _input(x, before, at, mask):
    """What is convolved, rounded as it is kept."""
    u = tl.load(x + at, mask, 0.0)
    if before is not None:
        u = (u.to(tl.float32) * tl.load(before + at, mask, 0.0).to(tl.float32)).to(u.dtype)
    return u


@triton.jit
def _result(y, after, at, mask, SILU: tl.constexpr):
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    if after is not None:
        y *= tl.load(after + at, mask, 0.0).to(tl.float32)
    return y


@fast_launch
@triton.jit
def _of_rows(
    x, before, after, stride, weight, bias, state, states, starts, out, out_stride, channels,
    K: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Convolve some channels of a row, token by token."""
    release_dependents(OVERLAP)
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < channels
    wait_for_inputs(OVERLAP)
    own = state + tl.load(states + row) * (K - 1) * channels + c
    for token in range(tl.load(starts + row), tl.load(starts + row + 1)):
        u = _input(x, before, token * stride + c, mask)
        y = u.to(tl.float32) * tl.load(weight + (K - 1) * channels + c, mask, 0.0).to(tl.float32)
        if bias is not None:
            y += tl.load(bias + c, mask, 0.0).to(tl.float32)
        for i in tl.static_range(K - 1):
            past = tl.load(own + i * channels, mask, 0.0)
            y += past.to(tl.float32) * tl.load(weight + i * channels + c, mask, 0.0).to(tl.float32)
            if i:
                tl.store(own + (i - 1) * channels, past, mask)
        tl.store(own + (K - 2) * channels, u, mask)
        y = _result(y, after, token * stride + c, mask, SILU)
        tl.store(out + token * out_stride + c, y.to(out.dtype.element_ty), mask)


@fast_launch
@triton.jit
def _of_tokens(
    x, before, after, stride, weight, bias, state, states, starts, out, out_stride, channels, tokens, number,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, K: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Convolve some channels of a block of tokens; what comes before a row's first token is in its state."""
    release_dependents(OVERLAP)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token, is_channel = token < tokens, c < channels
    mask = is_token[:, None] & is_channel[None, :]
    wait_for_inputs(OVERLAP)
    each = tl.arange(0, ROWS)
    ends = tl.load(starts + 1 + each, each < number, 1 << 62)
    row = tl.sum((token[:, None] >= ends[None, :]).to(tl.int32), 1)
    start = tl.load(starts + row, is_token, 0)
    own = tl.load(states + row, is_token, 0) * (K - 1) * channels
    y = tl.zeros((TOKENS, BLOCK), tl.float32)
    if bias is not None:
        y += tl.load(bias + c, is_channel, 0.0).to(tl.float32)[None, :]
    for i in tl.static_range(K):
        at = token - (K - 1) + i
        inside = (at >= start)[:, None] & mask
        u = _input(x, before, at[:, None] * stride + c[None, :], inside).to(tl.float32)
        if i < K - 1:
            kept = (own + (at - start + K - 1) * channels)[:, None] + c[None, :]
            u += tl.load(state + kept, mask & (at < start)[:, None], 0.0).to(tl.float32)
        y += u * tl.load(weight + i * channels + c, is_channel, 0.0).to(tl.float32)[None, :]
    y = _result(y, after, token[:, None] * stride + c[None, :], mask, SILU)
    tl.store(out + token[:, None] * out_stride + c[None, :], y.to(out.dtype.element_ty), mask)


@fast_launch
@triton.jit
def _move_states(
    x, before, stride, state, states, starts, channels,
    K: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Replace some channels of a row's state by its last inputs; what a short row leaves of the state moves up."""
    release_dependents(OVERLAP)
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < channels
    wait_for_inputs(OVERLAP)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    own = state + tl.load(states + row) * (K - 1) * channels + c
    for i in tl.static_range(K - 1):
        at = end - (K - 1) + i
        if at >= start:
            u = _input(x, before, at * stride + c, mask)
        else:
            u = tl.load(own + (at - start + K - 1) * channels, mask, 0.0)
        tl.store(own + i * channels, u, mask)
