"""Kernels with their weights bound to them: one row takes half of the time that looking at all arguments takes.

For models whose steps are never recorded (recording.py); inputs are rows of the weights' dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.compute.kernels.cpu.library import address, library
from quire.compute.kernels.cpu.linear import PANEL, PackedWeight, linear, linear_silu_and_mul
from quire.compute.kernels.cpu.norm import rms_norm, serves_weight

Rows = Callable[[Tensor], Tensor]
"""A function from rows [n, columns] to rows [n, width]."""


def bound_linear(packed: Tensor | PackedWeight, bias: Tensor | None) -> Rows:
    """Return `linear` with this weight [width, columns] and bias."""
    if not isinstance(packed, PackedWeight):
        return lambda x: linear(x, packed, bias)
    return _product("linear", packed, bias, packed.rows)


def bound_silu_and_mul(packed: Tensor | PackedWeight, bias: Tensor | None, width: int) -> Rows:
    """Return `linear_silu_and_mul` with this weight [2 · width, columns] and bias."""
    if isinstance(packed, PackedWeight) and packed.rows % (2 * PANEL) == 0:
        return _product("linear_silu_and_mul", packed, bias, width)

    def multiply(x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0], width))
        linear_silu_and_mul(x, packed, bias, out)
        return out

    return multiply


def bound_rms_norm(weight: Tensor, eps: float, dtype: torch.dtype) -> Rows:
    """Return `rms_norm` with this weight [width], for rows of `dtype`."""
    kernels, width, in_fp32 = library(), weight.numel(), weight.dtype == torch.float32
    if kernels is None or not serves_weight(weight, torch.empty((), dtype=dtype)):

        def norm(x: Tensor) -> Tensor:
            x = x.contiguous()
            out = torch.empty_like(x)
            rms_norm(x, weight, eps, out)
            return out

        return norm
    function = kernels.function("rms_norm", dtype)

    def norm_directly(x: Tensor) -> Tensor:
        if x.dtype != dtype or x.shape[-1] != width:
            raise RuntimeError(f"a norm of {width} {dtype} got {x.shape[-1]} {x.dtype}")
        x = x.contiguous()
        out = torch.empty_like(x)
        rows = x.numel() // width
        function(x.data_ptr(), None, weight.data_ptr(), in_fp32, 1, eps, rows, width, out.data_ptr())
        return out

    return norm_directly


def _product(name: str, packed: PackedWeight, bias: Tensor | None, width: int) -> Rows:
    data, rows, columns, kernels = packed
    dtype, weight, added = data.dtype, data.data_ptr(), address(bias)
    assert bias is None or (bias.dtype == dtype and bias.is_contiguous())
    function, empty = kernels.function(name, dtype), torch.empty

    def multiply(x: Tensor) -> Tensor:
        count, given = x.shape
        if given != columns or x.dtype != dtype:
            raise RuntimeError(f"a product of {columns} {dtype} got {given} {x.dtype}")
        x = x.contiguous()
        y = empty((count, width), dtype=dtype)
        function(x.data_ptr(), columns, count, weight, rows, columns, added, y.data_ptr(), width)
        return y

    multiply.__dict__["packed"] = packed, bias  # whose addresses it has
    return multiply
