"""A mixture of experts on a card, captured in graphs at any number of tokens: no launch depends on where tokens go.

How products are cut is a table of measured choices, `table`; a mixture that was not measured is served like the
measured one nearest to it, at the number of tokens that gives an expert as many.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from quire.kernels.triton.experts import routing
from quire.kernels.triton.experts.products import by_tiles, one_by_one
from quire.kernels.triton.experts.tuned_expert_configs import CUTS, OVERLAP
from quire.kernels.triton.launching.dependent_launch import can_overlap
from quire.kernels.triton.launching.device_properties import program_memory
from quire.kernels.triton.linear.rows import Rows
from quire.kernels.triton.linear.tiles import Tiles

Cuts = tuple[Rows, Rows] | tuple[Tiles, Tiles]
"""Of the first product, whose rows of weight are gates and ups together, and of the second."""

IN_FP32 = (Tiles(16, 32, 32, 1, 4, 3, False), Tiles(16, 32, 32, 1, 4, 3, False))
"""Tensor cores have no fp32: this is for correctness."""

route = routing.route


def pack_experts(weights: Tensor) -> Tensor:
    """The weights [experts, rows, columns] as `experts` wants them: as they are."""
    return weights


def experts(x: Tensor, gate_up: Tensor, down: Tensor, numbers: Tensor, weights: Tensor, out: Tensor) -> None:
    """Arguments as in reference/experts.py; all are contiguous, the weights as `pack_experts` gives them and the
    numbers int32."""
    assert all(tensor.is_contiguous() for tensor in (x, gate_up, down, numbers, weights, out))
    if not len(x):
        return
    half = x.dtype != torch.float32
    mixture = (len(down), numbers.shape[1], down.shape[1], down.shape[2])
    cuts = choice(mixture, len(x), program_memory(x.device)) if half else IN_FP32
    multiply(x, gate_up, down, numbers, weights, out, cuts, overlap=OVERLAP and can_overlap(x.device))


def multiply(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    cuts: Cuts,
    *,
    overlap: bool,
) -> None:
    """`experts`, with both products cut in this way, and `overlap` as in dependent_launch."""
    if isinstance(cuts[0], Rows):
        one_by_one(x, gate_up, down, numbers, weights, out, cuts, overlap)
    else:
        by_tiles(x, gate_up, down, numbers, weights, out, cuts, overlap)


@functools.cache
def choice(mixture: tuple[int, int, int, int], tokens: int, memory: int) -> Cuts:
    """The cuts for a mixture (experts, chosen, hidden, width) and this many tokens; of tiles that are larger than a
    program's shared memory, the next smaller ones."""

    def distance(measured: tuple[int, int, int, int]) -> float:
        return sum(abs(math.log(ours / theirs)) for ours, theirs in zip(mixture, measured, strict=True))

    nearest = min(CUTS, key=distance)
    experts, chosen, *_ = mixture
    alike = tokens * (chosen / experts) / (nearest[1] / nearest[0])
    fitting = [(most, cuts) for most, cuts in CUTS[nearest] if all(_bytes_of(cut) <= memory for cut in cuts)]
    return next((cuts for most, cuts in fitting if alike <= most), fitting[-1][1])


def _bytes_of(cut: Rows | Tiles) -> int:
    """Of shared memory, on cards before Hopper; for that the table was measured, and it has as much as is asked for."""
    if isinstance(cut, Rows):
        return 0
    return (cut.block_m + cut.block_n) * cut.block_k * 2 * (cut.stages - 1)
