"""Matrix products with weights that are packed once: by our own kernels, or without them by oneDNN.

Our layout serves any number of rows: one row at the speed of memory, hundreds at that of the processor.

Where bf16 is widened to be multiplied, `pack_rounded` makes 16-bit integers of it, whose products take half of the time
(native/int16.cpp): with a scale for each output and each STRETCH of columns. Rows of activations are rounded to 16
bits, too, with a scale for each stretch, and sums are exact; results are as near to exact products as those of bf16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import pad

from quire.compute.kernels.cpu import blocks
from quire.compute.kernels.cpu.activation import silu_and_mul
from quire.compute.kernels.cpu.library import Library, library
from quire.compute.kernels.reference.gguf_blocks import BlockWeight

PANEL = 64
"""Outputs that lie side by side in our layout."""
STRETCH = 256
"""Columns of a rounded weight that have a scale together."""
_LARGEST = 32767
"""The largest 16-bit integer, which each stretch of a row of activations reaches."""
_LARGEST_SUM = 65_000
"""The maximum sum of a stretch's codes of one output, without their signs: such a row times it stays below 2³¹, also
where rounding adds a half to each of 256 codes."""
_SMALLEST = 1e-30
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


def pack_rounded(weight: Tensor) -> Tensor | PackedWeight | BlockWeight:
    """Round bf16 weights where bf16 is widened to be multiplied; others are packed as by `pack_linear`."""
    kernels = library()
    if kernels is None or weight.dtype != torch.bfloat16 or not (kernels.widens_bf16 and kernels.multiplies_bytes):
        return pack_linear(weight)
    (rows, columns), panels = weight.shape, -(-weight.shape[0] // PANEL)
    parts = []
    for begin in range(0, columns, STRETCH):
        part = weight[:, begin : begin + STRETCH].float()
        sizes = part.abs()
        scales = torch.maximum(sizes.amax(1) / _LARGEST, sizes.sum(1) / _LARGEST_SUM).clamp_min(_SMALLEST)
        codes = (part / scales[:, None]).round_().to(torch.int16)
        codes = pad(codes, (0, part.shape[1] % 2, 0, -rows % PANEL)).view(panels, PANEL, -1, 2).transpose(1, 2)
        parts.append(pad(scales, (0, -rows % PANEL)).view(panels, PANEL).view(torch.uint8))
        parts.append(codes.reshape(panels, -1).view(torch.uint8))
    return BlockWeight(torch.cat(parts, 1).unsqueeze(1), f"I16/{STRETCH}", rows, columns)


def packed_shape(rows: int, columns: int, element: int) -> tuple[int, int, int, int]:
    """Return the shape of `PackedWeight.data` for elements of `element` bytes."""
    group = 4 // element
    return (-(-rows // PANEL), -(-columns // group), PANEL, group)


def linear(x: Tensor, packed: Tensor | PackedWeight | BlockWeight, bias: Tensor | None) -> Tensor:
    if isinstance(packed, BlockWeight):
        y = torch.empty((x.shape[0], packed.rows), dtype=x.dtype)
        blocks.block_linear(x, packed, bias, y)
        return y
    if isinstance(packed, PackedWeight):
        y = torch.empty((x.shape[0], packed.rows), dtype=x.dtype)
        _multiply("linear", x, packed, bias, y)
        return y
    if not packed.is_mkldnn:
        return F.linear(x, packed, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


def linear_silu_and_mul(
    x: Tensor, packed: Tensor | PackedWeight | BlockWeight, bias: Tensor | None, out: Tensor
) -> None:
    if isinstance(packed, BlockWeight):
        blocks.block_linear_silu_and_mul(x, packed, bias, out)
    elif isinstance(packed, PackedWeight) and packed.rows % (2 * PANEL) == 0:
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
