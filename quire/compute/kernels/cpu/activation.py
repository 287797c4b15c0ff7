"""The activations of MLPs, and the bound of logits."""

from __future__ import annotations

from torch import Tensor

from quire.compute.kernels.cpu.library import Library, library
from quire.compute.kernels.reference import activation as reference


def silu_and_mul(x: Tensor, out: Tensor) -> None:
    """Arguments as in reference/activation.py."""
    if (kernels := _serving(x, out)) is None:
        reference.silu_and_mul(x, out)
    else:
        kernels("silu_and_mul", x.dtype, x.data_ptr(), *out.shape, out.data_ptr())


def gelu_and_mul(x: Tensor, out: Tensor) -> None:
    """Arguments as in reference/activation.py."""
    if (kernels := _serving(x, out)) is None:
        reference.gelu_and_mul(x, out)
    else:
        kernels("gelu_and_mul", x.dtype, x.data_ptr(), *out.shape, out.data_ptr())


def gelu(x: Tensor, out: Tensor) -> None:
    """Arguments as in reference/activation.py."""
    if (kernels := _serving(x, out)) is None:
        reference.gelu(x, out)
    else:
        kernels("gelu", x.dtype, x.data_ptr(), *out.shape, out.data_ptr())


def soft_cap(x: Tensor, cap: float) -> None:
    """Arguments as in reference/activation.py."""
    if (kernels := _serving(x, x)) is None:
        reference.soft_cap(x, cap)
    else:
        kernels("soft_cap", x.dtype, x.data_ptr(), *x.shape, cap)


def _serving(x: Tensor, out: Tensor) -> Library | None:
    """The kernels, if they can work on these."""
    kernels = library()
    whole = x.dim() == 2 and x.is_contiguous() and out.is_contiguous()
    return kernels if kernels is not None and whole and kernels.serves(x, out) else None
