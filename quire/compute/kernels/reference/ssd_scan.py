"""Selective state spaces of Mamba2."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.reference.state_inputs import StateRows, steps_of


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
    """Take each row's state through its tokens, and write what each token reads of it to out, rounded once.

    With Δ = softplus(dt + dt_bias) within its bounds, S = exp(Δ · decay) S + Δ b xᵀ and out = Sᵀ c + skip · x, in fp32
    (Dao & Gu 2024, "Transformers are SSMs", section 3).

    Args:
        xbc: [tokens, heads · p + 2 · groups · n]: x of all heads, then b and c of all groups, each of which is for as
            many heads; rows may lie in a wider tensor.
        dt: [tokens, heads]; rows may lie in a wider tensor.
        decay: [heads] fp32, each less than 0.
        skip: [heads] fp32.
        dt_bias: [heads] fp32.
        state: [states, heads, n, p] fp32, changed in place.
        rows: The rows, and the state of each.
        out: [tokens, heads · p].
        dt_bounds: The smallest and the largest Δ.
    """
    heads, n, p = state.shape[1:]
    inner = (xbc.shape[1] - heads * p) // 2
    x, b, c = torch.split(xbc.float(), [heads * p, inner, inner], dim=1)
    x = torch.unflatten(x, 1, (heads, p))
    b, c = (_of_heads(torch.unflatten(each, 1, (-1, n)), heads) for each in (b, c))
    delta = F.softplus(dt.float() + dt_bias).clamp(*dt_bounds)[..., None, None]  # [tokens, heads, 1, 1]
    kept = (delta * decay[:, None, None]).exp()
    for tokens, own in steps_of(rows, state):
        now = state[own] * kept[tokens] + delta[tokens] * b[tokens, :, :, None] * x[tokens, :, None]
        state[own] = now
        y = (now * c[tokens, :, :, None]).sum(2) + skip[:, None] * x[tokens]
        out[tokens] = y.flatten(1).to(out.dtype)


def _of_heads(of_groups: Tensor, heads: int) -> Tensor:
    """Repeat [tokens, groups, n] for the heads of each group."""
    return of_groups.repeat_interleave(heads // of_groups.shape[1], dim=1)
