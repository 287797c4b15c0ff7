"""Root mean square norms beside a gate, in one pass."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from quire.compute.kernels.cpu.library import library_for
from quire.compute.kernels.reference import gated_norm as reference


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
    """Arguments as in reference/gated_norm.py."""
    kernels = library_for(x, weight, out)
    if kernels is None or gate.stride(1) != 1 or not kernels.serves(x, gate):
        reference.gated_norm(x, gate, weight, eps, group, out, norm_first=norm_first, activation=activation)
        return
    weights = group if weight is None else weight.numel()
    kernels(
        "gated_norm", x.dtype, x, gate, gate.stride(0), weight, weights, eps, *x.shape, group, norm_first,
        activation == "sigmoid", out,
    )  # fmt: skip
