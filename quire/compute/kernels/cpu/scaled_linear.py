"""Products with 8-bit codes that have scales.

int8 weights with a scale for each output: where the processor multiplies bytes (native/int8.cpp), a panel has first the
scales of its outputs, fp32, then codes, [columns / QUAD, outputs, QUAD] uint8, 128 more than they were. Rows of
activations are rounded to int8 with a scale for each, which is what W8A8 means. Other processors take the kernels of
grouped_linear.py, which round activations to 16 bits.

fp8 weights (e4m3, native/float8.cpp): a panel has first the scales of its outputs, fp32, block by block, then codes,
[columns, outputs], which are widened to floats in registers. Activations are not rounded, even if a checkpoint says so:
that is nearer to what the model was, and no slower.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.compute.kernels.cpu import blocks
from quire.compute.kernels.cpu.grouped_linear import RUN, SIGN, pack_integers
from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.reference import linear as reference
from quire.compute.kernels.reference.gguf_blocks import BlockWeight
from quire.compute.kernels.reference.linear import ScaledWeight
from quire.compute.kernels.reference.quantized_rows import NormedRows

QUAD = 4
"""Columns that one instruction multiplies."""
MAX_COLUMNS = 1 << 16
"""The maximum number of columns whose sum of int8 products fits 32 bits."""
_STEP = 16
"""Columns that are read at a time."""
_FLOAT8_BIAS = 256.0
"""The fp8 kernel reads codes as fp16, whose exponents have another bias."""


def pack_scaled(weight: ScaledWeight) -> ScaledWeight | BlockWeight:
    """Weights that our kernels do not serve keep the reference's form."""
    columns, kernels = weight.codes.shape[1], library()
    if kernels is None:
        return weight
    if weight.codes.dtype == torch.float8_e4m3fn:
        return pack_float8(weight)
    if weight.block != (1, columns):
        return weight
    if kernels.multiplies_bytes and columns % _STEP == 0 and columns <= MAX_COLUMNS:
        return pack_int8(weight)
    if columns % RUN:
        return weight
    return pack_integers(weight.codes.view(torch.uint8) ^ SIGN, weight.scales, None, 8, columns)


def scaled_linear(x: NormedRows, weight: ScaledWeight | BlockWeight, bias: Tensor | None) -> Tensor:
    if isinstance(weight, ScaledWeight):
        return reference.scaled_linear(x, weight, bias)
    y = x.new_empty((x.shape[0], weight.rows))
    blocks.block_linear(_dense(x), weight, bias, y)
    return y


def scaled_linear_silu_and_mul(
    x: NormedRows, weight: ScaledWeight | BlockWeight, bias: Tensor | None, out: Tensor
) -> None:
    if isinstance(weight, ScaledWeight):
        reference.scaled_linear_silu_and_mul(x, weight, bias, out)
    else:
        blocks.block_linear_silu_and_mul(_dense(x), weight, bias, out)


def pack_float8(weight: ScaledWeight) -> BlockWeight:
    """Pack an fp8 weight into panels, with zeros behind the last row."""
    (rows, columns), (block_rows, block) = weight.codes.shape, weight.block
    scales = weight.scales.repeat_interleave(block_rows, 0)[:rows].float() * _FLOAT8_BIAS
    panel = blocks.OWN_PANELS["F8"]
    parts = [_by_panel(each, panel).view(torch.uint8) for each in (scales, weight.codes.view(torch.uint8))]
    return BlockWeight(torch.cat(parts, 1).unsqueeze(1), f"F8/{block}", rows, columns)


def pack_int8(weight: ScaledWeight) -> BlockWeight:
    """Pack an int8 weight with a scale for each output into panels, with zeros behind the last row."""
    (rows, columns), panel = weight.codes.shape, blocks.OWN_PANELS["I8"]
    codes = pad(weight.codes.view(torch.uint8) ^ SIGN, (0, 0, 0, -rows % panel))
    quads = codes.view(-1, panel, columns // QUAD, QUAD).transpose(1, 2).flatten(1)
    packed = torch.cat((_by_panel(weight.scales, panel).view(torch.uint8), quads), 1)
    return BlockWeight(packed.unsqueeze(1), f"I8/{columns}", rows, columns)


def _by_panel(rows: Tensor, panel: int) -> Tensor:
    """[rows, n] → [panels, n · panel], output beside output."""
    padded = pad(rows, (0, 0, 0, -len(rows) % panel)) if len(rows) % panel else rows
    return padded.view(-1, panel, rows.shape[1]).transpose(1, 2).reshape(-1, rows.shape[1] * panel)


def _dense(x: NormedRows) -> Tensor:
    return x if isinstance(x, Tensor) else x.codes.float() * x.scales
