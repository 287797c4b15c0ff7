"""Products with integers of 4 or 8 bits whose columns share scales, computed in integers by the kernels of blocks.py.

A weight is packed as in blocks.py, where a block is a group: first the scales of all its outputs, fp32, then their
zeros, int8, then codes. 8-bit codes and their zeros are stored with a sign, 128 less than they were. Rows of
activations are rounded to 16 bits (native/block_rows.h).
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from quire.compute.gguf.tensor_types import PANEL
from quire.compute.kernels.cpu import blocks
from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.reference import linear as reference
from quire.compute.kernels.reference.gguf_blocks import BlockWeight
from quire.compute.kernels.reference.linear import GroupedWeight

RUN = 32
"""Columns whose products are added as integers."""
SIGN = 128
_SCALE_AND_ZERO = 5
"""Bytes of a scale and a zero together."""


class ReorderedBlocks(NamedTuple):
    """A weight in our layout whose columns stand in another order than those of x, as GroupedWeight describes."""

    blocks: BlockWeight
    order: Tensor


_Weight: TypeAlias = BlockWeight | ReorderedBlocks | GroupedWeight


def pack_grouped(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int, order: Tensor | None,
    gated: bool = False, dtype: torch.dtype = torch.bfloat16,
) -> _Weight:  # fmt: skip
    """The weight keeps the reference's form without our kernels, or where 32 columns have several scales."""
    if library() is None or group % RUN:
        return reference.pack_grouped(codes, scales, zeros, bits, group, order, gated)
    packed = pack_integers(codes, scales, zeros, bits, group)
    return packed if order is None else ReorderedBlocks(packed, order)


def grouped_linear(x: Tensor, weight: _Weight, bias: Tensor | None) -> Tensor:
    if isinstance(weight, GroupedWeight):
        return reference.grouped_linear(x, weight, bias)
    x, own = _in_order(x, weight)
    y = torch.empty((x.shape[0], own.rows), dtype=x.dtype)
    blocks.block_linear(x, own, bias, y)
    return y


def grouped_linear_silu_and_mul(x: Tensor, weight: _Weight, bias: Tensor | None, out: Tensor) -> None:
    if isinstance(weight, GroupedWeight):
        reference.grouped_linear_silu_and_mul(x, weight, bias, out)
    else:
        x, own = _in_order(x, weight)
        blocks.block_linear_silu_and_mul(x, own, bias, out)


def pack_integers(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int) -> BlockWeight:
    """Pack a weight into panels, with zeros behind the last row; arguments as in reference/linear.py."""
    rows, columns = codes.shape
    groups, block_bytes = columns // group, PANEL * (_SCALE_AND_ZERO + group * bits // 8)
    packed = torch.empty((-(-rows // PANEL), groups, block_bytes), dtype=torch.uint8)
    each = max(1, blocks.CODES_AT_ONCE // (PANEL * columns))
    for first in range(0, len(packed), each):
        part = slice(first * PANEL, (first + each) * PANEL)
        own = None if zeros is None else zeros[part]
        _pack_panels(codes[part], scales[part], own, bits, packed[first : first + each])
    return BlockWeight(packed, f"W{bits}/{group}", rows, columns)


def _in_order(x: Tensor, weight: BlockWeight | ReorderedBlocks) -> tuple[Tensor, BlockWeight]:
    if isinstance(weight, BlockWeight):
        return x, weight
    return x.index_select(1, weight.order), weight.blocks


def _pack_panels(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, to: Tensor) -> None:
    """Pack some rows into `to` [panels, groups, bytes]."""
    panels, count, _ = to.shape
    sign = SIGN if bits == 8 else 0
    if zeros is None:
        zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8)
    missing = panels * PANEL - len(codes)
    codes, scales, zeros = (
        torch.nn.functional.pad(each, (0, 0, 0, missing)) if missing else each for each in (codes, scales, zeros)
    )

    def by_group(each: Tensor) -> Tensor:
        """[rows, groups] → [panels, groups, bytes]."""
        return each.view(panels, PANEL, count).transpose(1, 2).contiguous().view(torch.uint8)

    runs = (codes ^ sign if sign else codes).reshape(panels, PANEL, -1, RUN)
    packed = blocks.pairs(runs) if bits == 8 else blocks.words(runs)
    pieces = (by_group(scales.float()), by_group(zeros ^ sign if sign else zeros), packed.reshape(panels, count, -1))
    torch.cat(pieces, 2, out=to)
