"""Root mean square norm and layer norm in one pass, with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.kernels.cpu.library import library_for
from quire.compute.kernels.reference import norm as reference


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, delta: Tensor | None = None) -> None:
    kernels = library_for(x, out, delta)
    if kernels is None or not serves_weight(weight, x):
        reference.rms_norm(x, weight, eps, out, delta)
        return
    width, in_fp32 = x.shape[-1], weight.dtype == torch.float32
    rows, weights = x.numel() // width, weight.numel() // width
    kernels("rms_norm", x.dtype, x, delta, weight, in_fp32, weights, eps, rows, width, out)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor, delta: Tensor | None = None) -> None:
    if (kernels := library_for(x, weight, bias, out, delta)) is None:
        reference.layer_norm(x, weight, bias, eps, out, delta)
    else:
        kernels("layer_norm", x.dtype, x, delta, weight, bias, eps, *x.shape, out)


def serves_weight(weight: Tensor, x: Tensor) -> bool:
    """Whether the kernels can apply a norm's weight to x."""
    return weight.dtype in (x.dtype, torch.float32) and weight.is_contiguous()
