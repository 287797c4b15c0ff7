"""Matrix products with weights that are packed once: by our own kernels, or without them by oneDNN.

Our layout serves any number of rows: one row at the speed of memory, hundreds at that of the processor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.cpu.activation import silu_and_mul
from quire.compute.kernels.cpu.library import Library, library

PANEL = 64
"""Outputs that lie side by side in our layout."""
_ROWS_HINT = 16
"""Number of rows that oneDNN chooses the layout for; any number may be multiplied then."""


class PackedWeight(NamedTuple):
    """A weight [rows, columns] in our layout.

    Attributes:
        data: [panels, groups of columns, PANEL, group], a group being two columns of bf16 or one of fp32; zeros follow
            the last row and column.
        library: The kernels that read the layout.
    """

    data: Tensor
    rows: int
    columns: int
    library: Library


def pack_linear(weight: Tensor) -> Tensor | PackedWeight:
    """Return the weight [rows, columns] as `linear` takes it: unchanged where no library serves its dtype."""
    kernels = library()
    if kernels is not None and kernels.serves(weight) and weight.stride(1) == 1:
        rows, columns = weight.shape
        data = torch.empty(packed_shape(rows, columns, weight.element_size()), dtype=weight.dtype)
        kernels("pack", weight.dtype, weight, weight.stride(0), rows, columns, data)
        return PackedWeight(data, rows, columns, kernels)
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return weight
    if weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        return packed
    return weight


def packed_shape(rows: int, columns: int, element: int) -> tuple[int, int, int, int]:
    """Return the shape of `PackedWeight.data` for elements of `element` bytes."""
    group = 4 // element
    return (-(-rows // PANEL), -(-columns // group), PANEL, group)


def linear(x: Tensor, packed: Tensor | PackedWeight, bias: Tensor | None) -> Tensor:
    if isinstance(packed, PackedWeight):
        y = torch.empty((x.shape[0], packed.rows), dtype=x.dtype)
        _multiply("linear", x, packed, bias, y)
        return y
    if not packed.is_mkldnn:
        return F.linear(x, packed, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


def linear_silu_and_mul(x: Tensor, packed: Tensor | PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    if isinstance(packed, PackedWeight) and packed.rows % (2 * PANEL) == 0:
        _multiply("linear_silu_and_mul", x, packed, bias, out)
    else:
        silu_and_mul(linear(x, packed, bias), out)


def _multiply(name: str, x: Tensor, packed: PackedWeight, bias: Tensor | None, y: Tensor) -> None:
    data, rows, columns, kernels = packed
    if x.stride(1) != 1:
        x = x.contiguous()
    assert x.dtype == data.dtype and x.shape[1] == columns and y.stride(1) == 1
    assert bias is None or bias.dtype == x.dtype
    kernels(name, x.dtype, x, x.stride(0), x.shape[0], data, rows, columns, bias, y, y.stride(0))
