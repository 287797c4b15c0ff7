"""The activations of MLPs, and the bound of logits."""

from __future__ import annotations

from torch import Tensor

from quire.compute.kernels.cpu.library import Library, library_for
from quire.compute.kernels.reference import activation as reference


def silu_and_mul(x: Tensor, out: Tensor) -> None:
    if (kernels := _library_for_rows(x, out)) is None:
        reference.silu_and_mul(x, out)
    else:
        kernels("silu_and_mul", x.dtype, x, *out.shape, out)


def gelu_and_mul(x: Tensor, out: Tensor) -> None:
    if (kernels := _library_for_rows(x, out)) is None:
        reference.gelu_and_mul(x, out)
    else:
        kernels("gelu_and_mul", x.dtype, x, *out.shape, out)


def gelu(x: Tensor, out: Tensor) -> None:
    if (kernels := _library_for_rows(x, out)) is None:
        reference.gelu(x, out)
    else:
        kernels("gelu", x.dtype, x, *out.shape, out)


def gelu_exact(x: Tensor, out: Tensor) -> None:
    if (kernels := _library_for_rows(x, out)) is None:
        reference.gelu_exact(x, out)
    else:
        kernels("gelu_exact", x.dtype, x, *out.shape, out)


def gelu_exact_and_mul(x: Tensor, out: Tensor) -> None:
    if (kernels := _library_for_rows(x, out)) is None:
        reference.gelu_exact_and_mul(x, out)
    else:
        kernels("gelu_exact_and_mul", x.dtype, x, *out.shape, out)


def quick_gelu(x: Tensor, out: Tensor) -> None:
    if (kernels := _library_for_rows(x, out)) is None:
        reference.quick_gelu(x, out)
    else:
        kernels("quick_gelu", x.dtype, x, *out.shape, out)


def relu(x: Tensor, out: Tensor) -> None:
    if (kernels := _library_for_rows(x, out)) is None:
        reference.relu(x, out)
    else:
        kernels("relu", x.dtype, x, *out.shape, out)


def relu_squared(x: Tensor, out: Tensor) -> None:
    if (kernels := _library_for_rows(x, out)) is None:
        reference.relu_squared(x, out)
    else:
        kernels("relu_squared", x.dtype, x, *out.shape, out)


def soft_cap(x: Tensor, cap: float) -> None:
    if (kernels := _library_for_rows(x)) is None:
        reference.soft_cap(x, cap)
    else:
        kernels("soft_cap", x.dtype, x, *x.shape, cap)


def _library_for_rows(*tensors: Tensor) -> Library | None:
    return library_for(*tensors) if tensors[0].dim() == 2 else None
