"""Root mean square norm and layer norm in one pass, with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.kernels.cpu.library import address, library
from quire.compute.kernels.reference import norm as reference


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, delta: Tensor | None = None) -> None:
    """Arguments as in reference/norm.py."""
    kernels = library()
    whole = x.is_contiguous() and out.is_contiguous() and (delta is None or delta.is_contiguous())
    if kernels is None or not whole or not kernels.serves(x, out, delta) or not serves_weight(weight, x):
        reference.rms_norm(x, weight, eps, out, delta)
        return
    width = x.shape[-1]
    kernels(
        "rms_norm", x.dtype, x.data_ptr(), address(delta), weight.data_ptr(), weight.dtype == torch.float32,
        weight.numel() // width, eps, x.numel() // width, width, out.data_ptr(),
    )  # fmt: skip


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor, delta: Tensor | None = None) -> None:
    """Arguments as in reference/norm.py."""
    kernels = library()
    whole = x.is_contiguous() and out.is_contiguous() and (delta is None or delta.is_contiguous())
    if kernels is None or not whole or not kernels.serves(x, weight, bias, out, delta):
        reference.layer_norm(x, weight, bias, eps, out, delta)
        return
    kernels(
        "layer_norm", x.dtype, x.data_ptr(), address(delta), weight.data_ptr(), bias.data_ptr(), eps, *x.shape,
        out.data_ptr(),
    )  # fmt: skip


def serves_weight(weight: Tensor, x: Tensor) -> bool:
    """Whether the kernels can apply a norm's weight to x."""
    return weight.dtype in (x.dtype, torch.float32) and weight.is_contiguous()
