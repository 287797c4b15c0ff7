"""What stands before and behind attention over latents (MLA): each head's product with a weight of its own, and the
step's entries.

With few tokens, a program multiplies some columns of one head, and has its part of the weight before it waits for the
kernel before it. With many, cuBLAS multiplies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.attention.score_scaling import padded_size
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch
from quire.compute.kernels.triton.norm import rms_normed

_FEW = 64
"""The most tokens for which a program holds its part of a weight."""
_ELEMENTS = 16 * 1024
"""Elements of a weight that a program holds."""


def head_products(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Implement reference/latents.py's `head_products`; the last dimensions of x and out are contiguous."""
    (tokens, heads, k), n = x.shape, weight.shape[2]
    if not tokens:
        return
    k_block = max(16, triton.next_power_of_2(k))
    if tokens > _FEW or k_block * 16 > _ELEMENTS:
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
        return
    assert x.stride(2) == out.stride(2) == 1
    overlap, n_block = can_overlap(x.device), max(16, min(64, _ELEMENTS // k_block))
    _head_products[(heads, cdiv(n, n_block), cdiv(tokens, 16))](
        x, weight, out, tokens, x.stride(0), x.stride(1), *weight.stride(), out.stride(0), out.stride(1),
        K=k, N=n, M=16, K_BLOCK=k_block, N_BLOCK=n_block, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip


def latent_inputs(q: Tensor, latent: Tensor, weight: Tensor, eps: float, qk: Tensor) -> None:
    """Implement reference/latents.py's `latent_inputs`; all tensors are contiguous, q in its last dimension."""
    tokens, rows, width = qk.shape
    rank = weight.shape[0]
    assert q.stride(2) == 1 and all(map(Tensor.is_contiguous, (latent, weight, qk)))
    if not tokens:
        return
    overlap, rotated = can_overlap(q.device), width - rank
    _latent_inputs[(tokens,)](
        q, latent, weight, qk, q.stride(0), q.stride(1), eps,
        HEADS=rows - 1, HEADS_BLOCK=triton.next_power_of_2(rows - 1), NOPE=q.shape[2] - rotated, R=rotated,
        R_BLOCK=padded_size(rotated), RANK=rank, RANK_BLOCK=padded_size(rank), OVERLAP=overlap, num_warps=4,
        launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize=["tokens"])
def _head_products(
    x, weight, out, tokens, x_token, x_head, w_head, w_row, w_column, out_token, out_head,
    K: tl.constexpr, N: tl.constexpr, M: tl.constexpr, K_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiply M tokens' rows of a head with some columns of its weight."""
    release_dependents(OVERLAP)
    head, token = tl.program_id(0).to(tl.int64), tl.program_id(2) * M + tl.arange(0, M)
    row, column = tl.arange(0, K_BLOCK), tl.program_id(1) * N_BLOCK + tl.arange(0, N_BLOCK)
    inside = (row < K)[:, None] & (column < N)[None, :]
    w = tl.load(weight + head * w_head + row[:, None] * w_row + column[None, :] * w_column, inside, 0.0)
    wait_for_inputs(OVERLAP)
    token = token.to(tl.int64)
    exists = (token < tokens)[:, None]
    values = tl.load(x + head * x_head + token[:, None] * x_token + row[None, :], exists & (row < K)[None, :], 0.0)
    y = tl.dot(values, w, input_precision="ieee")
    at = out + head * out_head + token[:, None] * out_token + column[None, :]
    tl.store(at, y.to(out.dtype.element_ty), exists & (column < N)[None, :])


@fast_launch
@triton.jit
def _latent_inputs(
    q, latent, weight, qk, q_token, q_head, eps,
    HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr, NOPE: tl.constexpr, R: tl.constexpr, R_BLOCK: tl.constexpr,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Place a token's rotated parts, and its latent."""
    release_dependents(OVERLAP)
    token, head = tl.program_id(0).to(tl.int64), tl.arange(0, HEADS_BLOCK)
    turning, column = tl.arange(0, R_BLOCK), tl.arange(0, RANK_BLOCK)
    rests, turns = column < RANK, turning < R
    w = tl.load(weight + column, rests, 0.0)
    wait_for_inputs(OVERLAP)
    entry, to = latent + token * (RANK + R), qk + token * (HEADS + 1) * (R + RANK)
    mask = (head < HEADS)[:, None] & turns[None, :]
    parts = tl.load(q + token * q_token + (head * q_head)[:, None] + (NOPE + turning)[None, :], mask, 0.0)
    shared = tl.load(entry + RANK + turning, turns, 0.0)
    values = tl.load(entry + column, rests, 0.0)
    normed = rms_normed(values[None, :], w[None, :], eps, RANK, qk.dtype.element_ty)
    tl.store(to + (head * (R + RANK))[:, None] + turning[None, :], parts, mask)
    own = to + HEADS * (R + RANK)
    tl.store(own + turning, shared, turns)
    tl.store(own + R + column[None, :], normed, rests[None, :])
