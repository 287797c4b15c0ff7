"""The gate of MLPs."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.cpu.library import library
from quire.kernels.reference import activation as reference


def silu_and_mul(x: Tensor, out: Tensor) -> None:
    """Arguments as in reference/activation.py."""
    kernels = library()
    if kernels is None or not kernels.serves(x, out) or not (x.is_contiguous() and out.is_contiguous()):
        reference.silu_and_mul(x, out)
        return
    rows, width = out.shape
    kernels("silu_and_mul", x.dtype, x.data_ptr(), rows, width, out.data_ptr())
