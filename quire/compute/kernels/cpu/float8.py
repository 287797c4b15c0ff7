"""fp8 weights (e4m3) as native/float8.cpp multiplies them: codes as they are stored, widened to floats in registers.

A panel has PANEL outputs: first their scales, fp32, block by block and output beside output, then codes,
[columns, PANEL]. Rows of activations are not rounded, also where a checkpoint would have them rounded to fp8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.kernels.reference.gguf_blocks import BlockWeight
from quire.compute.kernels.reference.scaled_linear import ScaledWeight

PANEL = 64
_BIAS = 256.0
"""The kernel reads codes as fp16, whose exponents have another bias."""


def pack_float8(weight: ScaledWeight) -> BlockWeight:
    """Panels of a weight, zeros behind the last row."""
    rows, columns = weight.codes.shape
    block_rows, block = weight.block
    panels, missing = -(-rows // PANEL), -rows % PANEL
    scales = weight.scales.repeat_interleave(block_rows, 0)[:rows].float() * _BIAS
    head = scales.shape[1] * PANEL * scales.element_size()
    packed = torch.empty((panels, 1, head + columns * PANEL), dtype=torch.uint8)
    packed[:, 0, :head] = _by_panel(scales, missing).view(torch.uint8)
    packed[:, 0, head:] = _by_panel(weight.codes.view(torch.uint8), missing)
    return BlockWeight(packed, f"F8/{block}", rows, columns)


def _by_panel(rows: Tensor, missing: int) -> Tensor:
    """[rows, n] → [panels, n · PANEL], output beside output."""
    padded = torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows
    return padded.view(-1, PANEL, rows.shape[1]).transpose(1, 2).reshape(-1, rows.shape[1] * PANEL)
