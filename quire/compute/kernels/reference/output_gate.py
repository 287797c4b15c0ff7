"""Gates of attention's output."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor


def gate_heads(x: Tensor, gate: Tensor, activation: Literal["sigmoid", "softplus"]) -> None:
    """Multiply x by σ(gate) or softplus(gate), computed in fp32 and rounded, in place.

    Args:
        x: [tokens, heads, d].
        gate: [tokens, heads, d], or [tokens, heads, 1] where one number gates a head.
        activation: The function of the gate.
    """
    wide = gate.float()
    x.mul_((wide.sigmoid() if activation == "sigmoid" else F.softplus(wide)).to(x.dtype))
