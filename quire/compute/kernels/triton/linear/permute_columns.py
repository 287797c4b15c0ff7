"""Columns of x to the order in which tensor cores take a packed weight's (packed_layout.py): one pass over memory.

It moves 4 bytes an element of bf16; a program takes a part of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch
from quire.compute.kernels.triton.linear.packed_layout import pairs_of

BLOCK, WARPS = 1_024, 4
"""Pairs of columns of a program, and its threads by 32."""


def permute_columns(x: Tensor) -> Tensor:
    """packed_layout.permuted(x) of x [rows, columns] in 16 bits."""
    rows, columns = x.shape
    pairs = pairs_of(x)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if rows:
        overlap = can_overlap(x.device)
        _permute_columns[(rows, cdiv(columns // 2, BLOCK))](
            pairs, out.view(torch.int32), pairs.stride(0),
            PAIRS=columns // 2, BLOCK=BLOCK, OVERLAP=overlap, num_warps=WARPS, launch_pdl=overlap,
        )  # fmt: skip
    return out


@fast_launch
@triton.jit
def _permute_columns(x, out, x_stride, PAIRS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    release_dependents(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    to = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = to < PAIRS
    come_from = to // 16 * 16 + to % 4 * 4 + to % 16 // 4  # of 16 pairs, (s and c, l) has (l, s and c)
    wait_for_inputs(OVERLAP)
    tl.store(out + row * PAIRS + to, tl.load(x + row * x_stride + come_from, inside, 0), inside)
