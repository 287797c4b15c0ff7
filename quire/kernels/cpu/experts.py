"""Experts on packed weights, each expert's on its own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire.kernels.cpu.linear import PackedWeight, linear, pack_linear
from quire.kernels.reference import experts as reference


def pack_experts(weights: Tensor) -> Sequence[Tensor | PackedWeight]:
    """The weights [experts, rows, columns] as `experts` wants them."""
    return [pack_linear(weight) for weight in weights]


def experts(
    x: Tensor,
    gate_up: Sequence[Tensor | PackedWeight],
    down: Sequence[Tensor | PackedWeight],
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
) -> None:
    """Arguments as in reference/experts.py; `gate_up` and `down` are packed."""
    reference.experts(x, gate_up, down, numbers, weights, out, linear)
