"""int8 weights with a scale for each output as native/int8.cpp multiplies them, where the processor multiplies bytes.

A panel has PANEL outputs: first their scales, fp32, then codes, [columns / QUAD, PANEL, QUAD] uint8, 128 more than they
were. Rows of activations are rounded to int8 with a scale for each, which is what W8A8 means.
"""

from __future__ import annotations

import torch

from quire.compute.kernels.cpu.library import Library
from quire.compute.kernels.reference.gguf_blocks import BlockWeight
from quire.compute.kernels.reference.scaled_linear import ScaledWeight

PANEL = 32
QUAD = 4
"""Columns that one instruction multiplies."""
MAX_COLUMNS = 1 << 16
"""Of which a sum still fits 32 bits."""
_STEP = 16
"""Columns that are read at a time."""
_SIGN = 128


def serves(kernels: Library, weight: ScaledWeight) -> bool:
    """Whether the kernels are there, and of use for this weight."""
    columns = weight.codes.shape[1]
    return kernels.multiplies_bytes and weight.block == (1, columns) and columns % _STEP == 0 and columns <= MAX_COLUMNS


def pack_int8(weight: ScaledWeight) -> BlockWeight:
    """Panels of a weight, zeros behind the last row."""
    rows, columns = weight.codes.shape
    panels, missing = -(-rows // PANEL), -rows % PANEL
    head = PANEL * weight.scales.element_size()
    packed = torch.empty((panels, 1, head + columns * PANEL), dtype=torch.uint8)
    scales = torch.nn.functional.pad(weight.scales, (0, 0, 0, missing))
    packed[:, 0, :head] = scales.view(panels, PANEL).view(torch.uint8)
    codes = torch.nn.functional.pad(weight.codes.view(torch.uint8) ^ _SIGN, (0, 0, 0, missing))
    quads = codes.view(panels, PANEL, columns // QUAD, QUAD).transpose(1, 2)
    packed[:, 0, head:] = quads.reshape(panels, -1)
    return BlockWeight(packed, f"I8/{columns}", rows, columns)
