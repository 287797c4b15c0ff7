"""The gated delta rule of linear attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.reference.state_inputs import StateRows, steps_of

EPS = 1e-6
"""Added to the squares of queries and keys before their norms are taken."""


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
    """Take each row's state through its tokens, and write what each token reads of it to out, rounded once.

    With g = exp(decay · softplus(a + a_bias)) and β = factor · σ(b), S = g S, S = S + k βᵀ(v - Sᵀ k) and out = Sᵀ q /
    √dk, in fp32, where q and k have unit length (Yang et al. 2024, "Gated Delta Networks", section 3). If a has a
    number for each element of k, g decays each by itself (Kimi Team 2025, "Kimi Linear", section 3). With a bound, g =
    exp(bound · σ(-decay · (a + a_bias))).

    Args:
        qkv: [tokens, 2 · keys · dk + values · dv]: queries and keys of `keys` heads, and values of `values` heads, of
            which as many share a query and a key; rows may lie in a wider tensor.
        a: [tokens, values] or [tokens, values · dk]; rows may lie in a wider tensor.
        b: [tokens, values]; rows may lie in a wider tensor.
        decay: [values] fp32, each less than 0.
        a_bias: [values] or [values · dk] fp32.
        state: [states, values, dk, dv] fp32, changed in place.
        rows: The rows, and the state of each.
        out: [tokens, values · dv].
        factor: Factor of β; with 2, states may change their sign (Grazzi et al. 2024, "Unlocking State-Tracking").
        bound: The least logarithm of g, less than 0; None: there is none.
    """
    values, dk, dv = state.shape[1:]
    keys = (qkv.shape[1] - values * dv) // 2
    q, k, v = torch.split(qkv.float(), [keys, keys, values * dv], dim=1)
    q, k = (_unit(torch.unflatten(each, 1, (-1, dk))).repeat_interleave(values * dk // keys, dim=1) for each in (q, k))
    v, beta = torch.unflatten(v, 1, (values, dv)), factor * b.float().sigmoid()[..., None]
    gate = torch.unflatten(a.float() + a_bias, 1, (values, -1))
    of_bound = None if bound is None else bound * (-decay[:, None] * gate).sigmoid()
    kept = (decay[:, None] * F.softplus(gate) if of_bound is None else of_bound).exp()
    for tokens, own in steps_of(rows, state):
        now = state[own] * kept[tokens][..., None]
        known = (now * k[tokens][..., None]).sum(2)
        now = now + k[tokens][..., None] * (beta[tokens] * (v[tokens] - known))[:, :, None]
        state[own] = now
        y = (now * q[tokens][..., None]).sum(2) * dk**-0.5
        out[tokens] = y.flatten(1).to(out.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()
