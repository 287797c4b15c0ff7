"""The activations of MLPs, and the bound of logits."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_and_mul(x: Tensor, out: Tensor) -> None:
    """out = silu(gate) · up (Shazeer 2020, SwiGLU): x [tokens, 2 · width] has gate, then up; out [tokens, width]."""
    gate, up = x.chunk(2, dim=-1)
    torch.ops.aten.silu.out(gate, out=out)
    out.mul_(up)


def gelu_and_mul(x: Tensor, out: Tensor) -> None:
    """out = gelu(gate) · up, with gelu in its tanh form (Shazeer 2020, GEGLU); arguments as for silu_and_mul."""
    gate, up = x.chunk(2, dim=-1)
    torch.ops.aten.gelu.out(gate, approximate="tanh", out=out)
    out.mul_(up)


def gelu(x: Tensor, out: Tensor) -> None:
    """out = gelu(x) in its tanh form (Hendrycks & Gimpel 2016); both [tokens, width] of one dtype."""
    torch.ops.aten.gelu.out(x, approximate="tanh", out=out)


def soft_cap(x: Tensor, cap: float) -> None:
    """x = cap · tanh(x / cap), in place (Gemma 2, section 2)."""
    x.div_(cap).tanh_().mul_(cap)
