"""Matrix product with a weight that a device may hold in a layout of its own."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.reference.activation import silu_and_mul


def pack_linear(weight: Tensor) -> Tensor:
    """The weight [rows, columns] as `linear` wants it; here as it is."""
    return weight


def linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + bias: x [tokens, columns], bias [rows] → [tokens, rows], all of one dtype."""
    return F.linear(x, packed, bias)


def linear_silu_and_mul(x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`linear`, and silu of the first half of its outputs times the second → out [tokens, rows / 2].

    A version may keep the product in fp32 until the gate is applied.
    """
    silu_and_mul(linear(x, packed, bias), out)
