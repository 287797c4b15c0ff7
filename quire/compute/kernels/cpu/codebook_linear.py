"""Products with mxfp4 weights in integers, by the kernels of blocks.py; other codes of sixteen values by the reference.

A weight is packed as in blocks.py, where a block is a group of 32 columns: first the exponents of all its outputs'
scales, one byte each, then codes, which stand for twice their values: integers. Rows of activations are rounded to 16
bits (native/block_rows.h).
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from quire.compute.gguf.tensor_types import PANEL
from quire.compute.kernels.cpu import blocks
from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.reference import linear as reference
from quire.compute.kernels.reference.gguf_blocks import BlockWeight
from quire.compute.kernels.reference.linear import CodebookWeight

_GROUP = 32
"""Columns that share a scale."""
_Weight: TypeAlias = BlockWeight | CodebookWeight


def pack_codebook(codes: Tensor, scales: Tensor, factors: Tensor | None, values: str, group: int) -> _Weight:
    """The weight keeps the reference's form without our kernels, or if it is not mxfp4."""
    is_mxfp4 = values == "e2m1" and group == _GROUP and scales.dtype == torch.float8_e8m0fnu and factors is None
    if library() is None or not is_mxfp4:
        return reference.pack_codebook(codes, scales, factors, values, group)
    (rows, columns), groups = codes.shape, codes.shape[1] // group
    packed = torch.empty((-(-rows // PANEL), groups, PANEL + PANEL * group // 2), dtype=torch.uint8)
    each = max(1, blocks.CODES_AT_ONCE // (PANEL * columns))
    exponents = scales.view(torch.uint8)
    for first in range(0, len(packed), each):
        part = slice(first * PANEL, (first + each) * PANEL)
        _pack_panels(codes[part], exponents[part], packed[first : first + each])
    return BlockWeight(packed, f"M4/{group}", rows, columns)


def codebook_linear(x: Tensor, weight: _Weight, bias: Tensor | None) -> Tensor:
    if isinstance(weight, CodebookWeight):
        return reference.codebook_linear(x, weight, bias)
    y = torch.empty((x.shape[0], weight.rows), dtype=x.dtype)
    blocks.block_linear(x, weight, bias, y)
    return y


def codebook_linear_silu_and_mul(x: Tensor, weight: _Weight, bias: Tensor | None, out: Tensor) -> None:
    if isinstance(weight, CodebookWeight):
        reference.codebook_linear_silu_and_mul(x, weight, bias, out)
    else:
        blocks.block_linear_silu_and_mul(x, weight, bias, out)


def _pack_panels(codes: Tensor, exponents: Tensor, to: Tensor) -> None:
    """Pack some rows into `to` [panels, groups, bytes], with zeros behind the last row."""
    panels, groups, _ = to.shape
    missing = panels * PANEL - len(codes)
    if missing:
        codes, exponents = (torch.nn.functional.pad(each, (0, 0, 0, missing)) for each in (codes, exponents))
    to[:, :, :PANEL] = exponents.view(panels, PANEL, groups).transpose(1, 2)
    to[:, :, PANEL:] = blocks.words(codes.view(panels, PANEL, groups, _GROUP))
