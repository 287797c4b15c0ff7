"""The activations of MLPs, and the bound of logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.activations import SILU, Activation


def silu_and_mul(x: Tensor, out: Tensor) -> None:
    """out = silu(gate) · up (Shazeer 2020, SwiGLU): x [tokens, 2 · width] has gate, then up; out [tokens, width]."""
    gate, up = x.chunk(2, dim=-1)
    torch.ops.aten.silu.out(gate, out=out)
    out.mul_(up)


def activated(x: Tensor, activation: Activation) -> Tensor:
    """Return the activation of x [tokens, 2 · width], gates, then ups, or of ups alone if it takes no gate."""
    if activation.kind == "relu2":
        return x.relu().square_()
    gate, up = x.chunk(2, dim=-1)
    if activation == SILU:
        return F.silu(gate).mul_(up)
    wide, other, limit = gate.float(), up.float(), activation.limit
    if limit is not None:
        other = other.clamp(-limit, limit)
        if activation.kind == "silu":
            return (F.silu(wide).clamp(max=limit) * other).to(gate.dtype)
        wide = wide.clamp(max=limit)
    if activation.kind == "gelu":
        return (F.gelu(wide, approximate="tanh") * other).to(gate.dtype)
    return (wide * torch.sigmoid(activation.alpha * wide) * (other + activation.added)).to(gate.dtype)


def gelu_and_mul(x: Tensor, out: Tensor) -> None:
    """out = gelu(gate) · up, with gelu in its tanh form (Shazeer 2020, GEGLU); arguments as for silu_and_mul."""
    gate, up = x.chunk(2, dim=-1)
    torch.ops.aten.gelu.out(gate, approximate="tanh", out=out)
    out.mul_(up)


def gelu(x: Tensor, out: Tensor) -> None:
    """out = gelu(x) in its tanh form (Hendrycks & Gimpel 2016); both [tokens, width] of one dtype."""
    torch.ops.aten.gelu.out(x, approximate="tanh", out=out)


def gelu_exact_and_mul(x: Tensor, out: Tensor) -> None:
    """out = gelu(gate) · up, with gelu in its exact form; arguments as for silu_and_mul."""
    gate, up = x.chunk(2, dim=-1)
    torch.ops.aten.gelu.out(gate, out=out)
    out.mul_(up)


def gelu_exact(x: Tensor, out: Tensor) -> None:
    """out = x · Φ(x) (Hendrycks & Gimpel 2016); both [tokens, width] of one dtype."""
    torch.ops.aten.gelu.out(x, out=out)


def quick_gelu(x: Tensor, out: Tensor) -> None:
    """out = x · σ(1.702 x) (Hendrycks & Gimpel 2016); both [tokens, width] of one dtype."""
    torch.mul(x, 1.702, out=out)
    out.sigmoid_().mul_(x)


def relu(x: Tensor, out: Tensor) -> None:
    """out = max(x, 0); both [tokens, width] of one dtype."""
    torch.clamp_min(x, 0, out=out)


def relu_squared(x: Tensor, out: Tensor) -> None:
    """out = max(x, 0)² (So et al. 2021, Primer); both [tokens, width] of one dtype."""
    torch.clamp_min(x, 0, out=out)
    out.square_()


def xielu(x: Tensor, parameters: Tensor, out: Tensor) -> None:
    """out = αp x² + β x where x > 0, otherwise αn (exp(min(x, ε)) - 1 - x) + β x (Huang & Schlag 2024, xIELU).

    Args:
        x, out: [tokens, width] of one dtype.
        parameters: [4] fp32: αp, αn, β, ε.
    """
    positive, negative, linear, eps = parameters
    wide = x.float()
    curved = torch.where(wide > 0, positive * wide * wide, (torch.expm1(torch.minimum(wide, eps)) - wide) * negative)
    out.copy_(curved.add_(wide * linear))


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return softmax(scores) over the last dimension, with one more score from `sinks` whose weight is left out.

    Args:
        scores: [kv_heads, group, queries, keys] fp32.
        sinks: [kv_heads · group] fp32; None: no more scores.
    """
    if sinks is None:
        return scores.softmax(-1)
    first = sinks.view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((first, scores), -1).softmax(-1)[..., 1:]


def add_slopes(scores: Tensor, slopes: Tensor, queries: Tensor, keys: Tensor) -> None:
    """Add slope · (key's position - query's position) to scores, in place.

    Args:
        scores: [kv_heads, group, queries, keys] fp32.
        slopes: [kv_heads · group] fp32.
        queries, keys: Their positions.
    """
    scores += slopes.view(*scores.shape[:2], 1, 1) * (keys - queries[:, None])


def soft_cap(x: Tensor, cap: float) -> None:
    """x = cap · tanh(x / cap), in place (Gemma 2, section 2)."""
    x.div_(cap).tanh_().mul_(cap)


def tanh(x: Tensor, out: Tensor) -> None:
    """out = tanh(x); both [tokens, width] of one dtype."""
    torch.tanh(x, out=out)
