"""Computes a low-rank update, the sum that it belongs to, and the following norm, row by row.

Behind a product of few rows, a launch takes as long as B A x. Each program of the norm has one row. It reads B of that
row's adapter, mostly from the cache, while the product ends, and keeps it in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.lora import LowRankWeights, Tiles
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import fast_launch
from quire.compute.kernels.triton.lora import lora_expand, scaled_outputs, scaling_of
from quire.compute.kernels.triton.norm import PER_THREAD, program_shape, rms_norm, rms_normed

_MAX_ROWS = 64
"""The maximum number of rows; more rows that share an adapter read it less often in tiles."""
_MAX_B = 65_536
"""The maximum number of B's elements that a program keeps in registers."""
_BLOCK_R = 16


def lora_rms_norm(
    low: Tensor, weights: LowRankWeights, tiles: Tiles, x: Tensor, weight: Tensor, eps: float, out: Tensor,
    delta: Tensor,
) -> None:  # fmt: skip
    """Implement reference/lora.py's `lora_rms_norm`; all tensors are contiguous.

    The product that made delta was launched as for `lora_expand` of lora.py.
    """
    rows, width = x.shape
    block, _, warps = program_shape(width, 1, PER_THREAD)
    if rows > _MAX_ROWS or block * _BLOCK_R > _MAX_B:
        lora_expand(low, weights, tiles, delta)
        rms_norm(x, weight, eps, out, delta)
        return
    assert tiles.slot_of_row is not None and len(weights.rows) == 1 and weight.dim() == 1
    assert x.is_contiguous() and delta.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    overlap, (factors, summands, scaled) = can_overlap(x.device), scaling_of(weights)
    _lora_rms_norm[(rows,)](
        low, weights.b, weights.ranks, factors, summands, scaled, tiles.slot_of_row, x, delta, weight, out,
        weights.b.stride(0), weights.ranks.stride(0), eps,
        WIDTH=width, BLOCK=block, RANK=weights.b.shape[2], BLOCK_R=_BLOCK_R, SCALED=weights.scaling is not None,
        OVERLAP=overlap, num_warps=warps, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["ranks", "ranks_stride", "factors", "summands", "scaled", "slot_of_row"])
def _lora_rms_norm(
    low, b, ranks, factors, summands, scaled, slot_of_row, x, delta, weight, out, b_stride, ranks_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, SCALED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    w = tl.load(weight + column, inside, 0.0)
    slot = tl.load(slot_of_row + row)
    used = tl.load(ranks + (slot - 1) * ranks_stride, slot != 0, 0)
    rescaled = tl.load(scaled + (slot - 1) * ranks_stride, slot != 0, 0) if SCALED else 0
    rank = tl.arange(0, BLOCK_R // 2)  # of an output a thread reads half of the ranks at once, and adds them up alone
    b += (slot - 1) * b_stride + column[:, None] * RANK + rank[None, :]
    its_low = low + row * RANK + rank
    changed = (column < tl.where(used != 0, WIDTH, 0))[:, None]
    first_b = tl.load(b, changed, 0.0)
    second_b = tl.load(b + BLOCK_R // 2, changed, 0.0)
    wait_for_inputs(OVERLAP)
    own = (row * WIDTH + column)[None, :]
    mask = inside[None, :]
    values = tl.load(x + own, mask, 0.0)
    outputs = tl.load(delta + own, mask, 0.0)
    its = rank < tl.where(used != 0, BLOCK_R // 2, 0)
    first_low = tl.load(its_low, its, 0.0)
    second_low = tl.load(its_low + BLOCK_R // 2, its, 0.0)
    added = outputs.to(tl.float32)  # all is asked for by now; see lora.py
    if used != 0:
        if SCALED:
            added = scaled_outputs(added, factors, summands, rescaled, slot, column, inside, b_stride)
        update = _b_low(first_b, first_low) + _b_low(second_b, second_low)
        for first in range(BLOCK_R, used, BLOCK_R // 2):
            update += _b_low(tl.load(b + first, changed, 0.0), tl.load(its_low + first))
        added += update[None, :]
    added = added.to(values.dtype).to(tl.float32)
    values = (values.to(tl.float32) + added).to(values.dtype)
    tl.store(x + own, values, mask)
    tl.store(out + own, rms_normed(values, w[None, :], eps, WIDTH, out.dtype.element_ty), mask)


@triton.jit
def _b_low(b, low):
    """Return [outputs] fp32, from some ranks of B [outputs, ranks] and of A x."""
    return tl.sum(b.to(tl.float32) * low.to(tl.float32)[None, :], 1)
