"""Root mean square norms beside a gate, as behind recurrent layers."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    group: int,
    out: Tensor,
    *,
    norm_first: bool,
    activation: Literal["silu", "sigmoid"] = "silu",
) -> None:
    """Write norm(x) · act(gate) or norm(x · act(gate)) to out, computed in fp32 and rounded once.

    Args:
        x: [tokens, width].
        gate: [tokens, width]; rows may lie in a wider tensor.
        weight: [width], or [group] if all groups have one; None: x is not normed.
        eps: Added to mean squares.
        group: How many elements are normed together.
        out: [tokens, width]; may be x.
        norm_first: Whether the gate comes behind the norm.
        activation: What the gate goes through.
    """
    factor = F.silu(gate.float()) if activation == "silu" else gate.float().sigmoid()
    y = x.float() if norm_first else x.float() * factor
    if weight is not None:
        grouped = torch.unflatten(y, 1, (-1, group))
        grouped = grouped * (grouped.square().mean(-1, keepdim=True) + eps).rsqrt()
        y = (grouped * weight.float().view(-1, group)).flatten(1)
    out.copy_(y * factor if norm_first else y)
