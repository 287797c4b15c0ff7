"""Matrix products of dense activations with integers of 4 or 8 bits, whose columns share scales in groups."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.compute.kernels.reference.activation import silu_and_mul

RUN = 16
"""Columns side by side of which one byte each has the low four bits; the high ones are those of the RUN after them."""


class GroupedWeight(NamedTuple):
    """A weight as integers: W[r, c] = scales[r, c // group] · (code[r, c] - zeros[r, c // group]).

    Attributes:
        packed: [outputs, columns] uint8 codes; or with 4 bits [outputs, columns / 2], each byte two codes, those of
            columns RUN apart: of every 2 · RUN columns, byte j has column j in its low bits and j + RUN in its high.
        scales: [outputs, groups] fp32 or fp16.
        zeros: [outputs, groups] uint8, fp16 where they are no integers, or None: the middle of all codes.
        bits: 4 or 8.
        group: Columns; divides their number.
        order: [columns] int64, which column of x stands where: W's columns are in the order of their groups. None: x's
            own.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int
    order: Tensor | None

    @property
    def columns(self) -> int:
        """Of W."""
        return self.scales.shape[-1] * self.group

    def dense(self) -> Tensor:
        """[outputs, columns] fp32, its columns in `order`."""
        codes = self.packed
        if self.bits == 4:
            runs = codes.view(len(codes), -1, RUN)
            codes = torch.stack((runs & 15, runs >> 4), 2).view(len(codes), -1)
        zeros = 1 << (self.bits - 1) if self.zeros is None else self.zeros.float().unsqueeze(-1)
        grouped = codes.float().view(len(codes), -1, self.group) - zeros
        return (grouped * self.scales.unsqueeze(-1)).flatten(1)


def pack_grouped(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group: int,
    order: Tensor | None,
    gated: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> GroupedWeight:
    """The weight as `grouped_linear` wants it.

    Args:
        codes: [outputs, columns] uint8, columns in `order`.
        scales, zeros, bits, group, order: See GroupedWeight.
        gated: Its outputs are gates, then ups, and mostly `grouped_linear_silu_and_mul` is asked for.
        dtype: Of the rows that it is multiplied with.

    Raises:
        ValueError: 4-bit codes of an odd number of runs.
    """
    if bits == 4:
        if codes.shape[1] % (2 * RUN):
            raise ValueError(
                f"4-bit weights of {codes.shape[1]} columns are not supported: {2 * RUN} must divide them."
            )
        runs = codes.view(len(codes), -1, 2, RUN)
        codes = (runs[:, :, 0] | runs[:, :, 1] << 4).flatten(1)
    return GroupedWeight(codes.contiguous(), scales, zeros, bits, group, order)


def grouped_linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None) -> Tensor:
    """x Wᵀ + bias in x's dtype: x [tokens, columns], bias [outputs] → [tokens, outputs]."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    y = (x.float() @ weight.dense().T).to(x.dtype)
    return y if bias is None else y + bias


def grouped_linear_silu_and_mul(x: Tensor, weight: GroupedWeight, bias: Tensor | None, out: Tensor) -> None:
    """`grouped_linear`, and silu of the first half of its outputs times the second → out [tokens, outputs / 2]."""
    silu_and_mul(grouped_linear(x, weight, bias), out)
