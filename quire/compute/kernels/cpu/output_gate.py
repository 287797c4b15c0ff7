"""Gates of attention's output in one pass."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.reference import output_gate as reference


def gate_heads(x: Tensor, gate: Tensor, activation: Literal["sigmoid", "softplus"]) -> None:
    """Arguments as in reference/output_gate.py."""
    kernels, (tokens, heads, d), each = library(), x.shape, gate.shape[2]
    whole = x.is_contiguous() and gate.stride()[1:] == (each, 1)
    if kernels is None or not whole or not kernels.serves(x, gate):
        reference.gate_heads(x, gate, activation)
        return
    softplus = activation == "softplus"
    kernels("gate_heads", x.dtype, x, gate, gate.stride(0), tokens, heads, d, each == 1, softplus)
