"""Matrix products of dense activations with 4-bit codes, each of which names one of sixteen values (W4A16)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.compute.gguf.tensor_types import NONLINEAR
from quire.compute.kernels.reference.activation import silu_and_mul
from quire.compute.kernels.reference.grouped_linear import RUN

CODEBOOKS: dict[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(
        sign * value
        for sign in (1.0, -1.0)
        for value in (0.0, 0.0052083334885537624, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)
    ),
    "e2m1": tuple(sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)),
    "iq4": tuple(map(float, NONLINEAR)),
}  # fmt: skip
"""What the codes stand for. nf4: quantiles of a normal distribution (Dettmers et al. 2023, QLoRA, appendix E); fp4:
bitsandbytes'; e2m1: the Open Compute Project's microscaling formats, version 1.0, section 5.3.3; iq4: GGUF's."""
_ROWS_AT_ONCE = 1024


class CodebookWeight(NamedTuple):
    """A weight as codes: W[r, c] = factors[r] · scales[r, c // group] · table[code[r, c]].

    Attributes:
        packed: [outputs, columns / 2] uint8, as that of a GroupedWeight with 4 bits.
        scales: [outputs, groups]: fp32, float8_e4m3fn, or float8_e8m0fnu, which are powers of two.
        factors: [outputs] fp32; None: ones.
        table: [16] fp32.
        group: Columns; divides their number.
        values: What is in the table: one of CODEBOOKS.
    """

    packed: Tensor
    scales: Tensor
    factors: Tensor | None
    table: Tensor
    group: int
    values: str

    @property
    def columns(self) -> int:
        """Of W."""
        return self.scales.shape[-1] * self.group

    def dense(self) -> Tensor:
        """[outputs, columns] fp32."""
        rows = len(self.packed)
        runs = self.packed.view(rows, -1, RUN)
        codes = torch.stack((runs & 15, runs >> 4), 2).view(rows, -1, self.group)  # [outputs, groups, group]
        values = self.table[codes.long()] * self.row_scales().unsqueeze(-1)
        return values.flatten(1)

    def row_scales(self) -> Tensor:
        """[outputs, groups] fp32, with the factors in them."""
        scales = self.scales.float()
        return scales if self.factors is None else scales * self.factors.unsqueeze(1)


def pack_codebook(codes: Tensor, scales: Tensor, factors: Tensor | None, values: str, group: int) -> CodebookWeight:
    """The weight as `codebook_linear` wants it.

    Args:
        codes: [outputs, columns] uint8 below 16; 2 · RUN divides the columns.
        scales, factors, group: See CodebookWeight.
        values: One of CODEBOOKS.
    """
    runs = codes.view(len(codes), -1, 2, RUN)
    table = torch.tensor(CODEBOOKS[values], dtype=torch.float32, device=codes.device)
    packed = (runs[:, :, 0] | runs[:, :, 1] << 4).flatten(1).contiguous()
    return CodebookWeight(packed, scales.contiguous(), factors, table, group, values)


def codebook_linear(x: Tensor, weight: CodebookWeight, bias: Tensor | None) -> Tensor:
    """x Wᵀ + bias in x's dtype: x [tokens, columns], bias [outputs] → [tokens, outputs]."""
    y = (x.float() @ weight.dense().T).to(x.dtype)
    return y if bias is None else y + bias


def codebook_linear_silu_and_mul(x: Tensor, weight: CodebookWeight, bias: Tensor | None, out: Tensor) -> None:
    """`codebook_linear`, and silu of the first half of its outputs times the second → out [tokens, outputs / 2]."""
    silu_and_mul(codebook_linear(x, weight, bias), out)


def nearest_codes(w: Tensor, values: str, group: int) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns] uint8 and scales [rows, groups] fp32 of a dense weight; a group's largest becomes 1.

    As bitsandbytes quantizes: of two values equally far away, the lower one.
    """
    table, order = torch.tensor(CODEBOOKS[values], device=w.device).sort()
    middles = (table[1:] + table[:-1]) / 2
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    scales = torch.empty((len(w), w.shape[1] // group), device=w.device)
    for first in range(0, len(w), _ROWS_AT_ONCE):
        part = w[first : first + _ROWS_AT_ONCE].float().view(-1, scales.shape[1], group)
        largest = part.abs().amax(-1)
        scaled = part * (1 / largest.clamp(min=torch.finfo(torch.float32).tiny)).unsqueeze(-1)
        found = order[torch.bucketize(scaled, middles)]
        codes[first : first + len(part)] = found.to(torch.uint8).flatten(1)
        scales[first : first + len(part)] = largest
    return codes, scales
