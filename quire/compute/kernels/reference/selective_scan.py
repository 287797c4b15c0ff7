"""Selective state spaces of Mamba, in which every channel has a state of its own."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.reference.state_inputs import StateRows, steps_of


def selective_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    decay: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    rows: StateRows,
    out: Tensor,
) -> None:
    """Take each row's state through its tokens, and write what each token reads of it to out, rounded once.

    With Δ = softplus(dt + dt_bias), S = exp(Δ · decay) S + b (Δ · x)ᵀ and out = Sᵀ c + skip · x, in fp32 (Gu & Dao
    2023, "Mamba", section 3.2).

    Args:
        x, dt: [tokens, channels]; rows may lie in a wider tensor.
        b, c: [tokens, n]; rows may lie in a wider tensor.
        decay: [n, channels] fp32, each less than 0.
        skip, dt_bias: [channels] fp32.
        state: [states, n, channels] fp32, changed in place.
        rows: The rows, and the state of each.
        out: [tokens, channels].
    """
    delta, wide = F.softplus(dt.float() + dt_bias), x.float()
    for tokens, own in steps_of(rows, state):
        now = state[own] * (delta[tokens, None] * decay).exp()
        now = now + b[tokens].float()[:, :, None] * (delta * wide)[tokens, None]
        state[own] = now
        y = (now * c[tokens].float()[:, :, None]).sum(1) + skip * wide[tokens]
        out[tokens] = y.to(out.dtype)
