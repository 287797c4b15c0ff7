"""The gated activation of the MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x: Tensor, out: Tensor) -> None:
    """out = silu(gate) · up (Shazeer 2020, SwiGLU).

    Args:
        x: [tokens, 2 · width]: gate, then up.
        out: [tokens, width], of the same dtype.
    """
    gate, up = x.chunk(2, dim=-1)
    torch.mul(F.silu(gate), up, out=out)
