"""Matrix products with weights of each form, which a device may keep in a layout of its own.

a Tensor          values of the activations' dtype
GroupedWeight     integers of 4 or 8 bits, whose columns share scales in groups
CodebookWeight    4-bit codes, each of which stands for one of sixteen values (W4A16)
ScaledWeight      8-bit codes with scales; activations are quantized too
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.gguf.tensor_types import NONLINEAR
from quire.compute.kernels.reference.activation import silu_and_mul
from quire.compute.kernels.reference.quantized_rows import NormedRows, QuantizedRows, quantize_rows

RUN = 16
"""Neighbouring columns whose codes are the low four bits of a byte each; the high bits are those of the next RUN."""
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
"""What codes stand for. nf4: quantiles of a normal distribution (Dettmers et al. 2023, QLoRA, appendix E); fp4:
bitsandbytes'; e2m1: the Open Compute Project's microscaling formats, version 1.0, section 5.3.3; iq4: GGUF's."""
_ROWS_AT_ONCE = 1024


# --- dense ------------------------------------------------------------------------------------------------------------


def pack_linear(weight: Tensor) -> Tensor:
    """Return the weight [rows, columns] as `linear` takes it; here unchanged."""
    return weight


def pack_rounded(weight: Tensor) -> Tensor:
    """Return the weight [rows, columns] as `linear` takes it, for many rows at a time; here unchanged.

    A version may round weights, and the rows that they are multiplied with, to 16-bit integers with scales.
    """
    return weight


def linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + bias: x [tokens, columns], bias [rows] → [tokens, rows], all of one dtype."""
    return F.linear(x, packed, bias)


def linear_silu_and_mul(x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write silu of the first half of the outputs of `linear` times the second half to out [tokens, rows / 2].

    A version may keep the product in fp32 until the gate is applied.
    """
    silu_and_mul(linear(x, packed, bias), out)


# --- integers ---------------------------------------------------------------------------------------------------------


class GroupedWeight(NamedTuple):
    """A weight as integers: W[r, c] = scales[r, c // group] · (code[r, c] - zeros[r, c // group]).

    Attributes:
        packed: [outputs, columns] uint8 codes of 8 bits; codes of 4 bits are [outputs, columns / 2], as `pack_nibbles`
            has them.
        scales: [outputs, groups] fp32 or fp16.
        zeros: [outputs, groups] uint8, or fp16 where they are no integers; None: the middle of all codes.
        bits: 4 or 8.
        group: How many columns share a scale; it divides the columns.
        order: [columns] int64, which column of x each column of W multiplies; None: W's columns are in x's order.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int
    order: Tensor | None

    @property
    def columns(self) -> int:
        return self.scales.shape[-1] * self.group

    def dense(self) -> Tensor:
        """Return [outputs, columns] fp32, with the columns in `order`."""
        codes = unpack_nibbles(self.packed) if self.bits == 4 else self.packed
        zeros = 1 << (self.bits - 1) if self.zeros is None else self.zeros.float().unsqueeze(-1)
        grouped = codes.float().view(len(codes), -1, self.group) - zeros
        return (grouped * self.scales.unsqueeze(-1)).flatten(1)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack 4-bit codes two to a byte: [outputs, columns] uint8 → [outputs, columns / 2].

    Of every 2 · RUN columns, byte j has column j in its low bits and column j + RUN in its high bits.
    """
    runs = codes.view(len(codes), -1, 2, RUN)
    return (runs[:, :, 0] | runs[:, :, 1] << 4).flatten(1).contiguous()


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Undo `pack_nibbles`."""
    runs = packed.view(len(packed), -1, RUN)
    return torch.stack((runs & 15, runs >> 4), 2).view(len(packed), -1)


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
    """Return the weight as `grouped_linear` takes it.

    Args:
        codes: [outputs, columns] uint8, columns in `order`.
        scales, zeros, bits, group, order: As in GroupedWeight.
        gated: Outputs are gates, then ups, and `grouped_linear_silu_and_mul` is what mostly uses the weight.
        dtype: The dtype of the rows that the weight is multiplied with.

    Raises:
        ValueError: 4-bit codes of an odd number of runs.
    """
    if bits == 4:
        if codes.shape[1] % (2 * RUN):
            raise ValueError(
                f"4-bit weights of {codes.shape[1]} columns are not supported: {2 * RUN} must divide them."
            )
        codes = pack_nibbles(codes)
    return GroupedWeight(codes.contiguous(), scales, zeros, bits, group, order)


def grouped_linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + bias in x's dtype: x [tokens, columns], bias [outputs] → [tokens, outputs]."""
    return _multiply(x if weight.order is None else x.index_select(1, weight.order), weight, bias)


def grouped_linear_silu_and_mul(x: Tensor, weight: GroupedWeight, bias: Tensor | None, out: Tensor) -> None:
    """Write silu of the first half of the outputs of `grouped_linear` times the second half to out."""
    silu_and_mul(grouped_linear(x, weight, bias), out)


# --- codes of sixteen values ------------------------------------------------------------------------------------------


class CodebookWeight(NamedTuple):
    """A weight as codes: W[r, c] = factors[r] · scales[r, c // group] · table[code[r, c]].

    Attributes:
        packed: [outputs, columns / 2] uint8, as `pack_nibbles` has them.
        scales: [outputs, groups]: fp32, float8_e4m3fn, or float8_e8m0fnu, which are powers of two.
        factors: [outputs] fp32; None: ones.
        table: [16] fp32.
        group: How many columns share a scale; it divides the columns.
        values: The name of the table in CODEBOOKS.
    """

    packed: Tensor
    scales: Tensor
    factors: Tensor | None
    table: Tensor
    group: int
    values: str

    @property
    def columns(self) -> int:
        return self.scales.shape[-1] * self.group

    def dense(self) -> Tensor:
        """Return [outputs, columns] fp32."""
        codes = unpack_nibbles(self.packed).view(len(self.packed), -1, self.group)
        return (self.table[codes.long()] * self.row_scales().unsqueeze(-1)).flatten(1)

    def row_scales(self) -> Tensor:
        """Return [outputs, groups] fp32, the scales times the factors."""
        scales = self.scales.float()
        return scales if self.factors is None else scales * self.factors.unsqueeze(1)


def pack_codebook(codes: Tensor, scales: Tensor, factors: Tensor | None, values: str, group: int) -> CodebookWeight:
    """Return the weight as `codebook_linear` takes it.

    Args:
        codes: [outputs, columns] uint8 below 16; 2 · RUN divides the columns.
        scales, factors, values, group: As in CodebookWeight.
    """
    table = torch.tensor(CODEBOOKS[values], dtype=torch.float32, device=codes.device)
    return CodebookWeight(pack_nibbles(codes), scales.contiguous(), factors, table, group, values)


def codebook_linear(x: Tensor, weight: CodebookWeight, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + bias in x's dtype: x [tokens, columns], bias [outputs] → [tokens, outputs]."""
    return _multiply(x, weight, bias)


def codebook_linear_silu_and_mul(x: Tensor, weight: CodebookWeight, bias: Tensor | None, out: Tensor) -> None:
    """Write silu of the first half of the outputs of `codebook_linear` times the second half to out."""
    silu_and_mul(codebook_linear(x, weight, bias), out)


def nearest_codes(w: Tensor, values: str, group: int) -> tuple[Tensor, Tensor]:
    """Quantize a dense weight as bitsandbytes does: of two values equally far away, it takes the lower one.

    Returns:
        Codes [rows, columns] uint8, and scales [rows, groups] fp32, by which a group's largest magnitude becomes 1.
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


def _multiply(x: Tensor, weight: GroupedWeight | CodebookWeight, bias: Tensor | None) -> Tensor:
    y = (x.float() @ weight.dense().T).to(x.dtype)
    return y if bias is None else y + bias


# --- 8-bit codes ------------------------------------------------------------------------------------------------------


class ScaledWeight(NamedTuple):
    """A weight as codes and scales: W[r, c] = codes[r, c] · scales[r // block rows, c // block columns].

    Attributes:
        codes: [outputs, columns] float8_e4m3fn or int8.
        scales: [outputs / block rows, columns / block columns], rounded up, fp32.
        block: How many rows and columns share a scale; (1, columns): each output has one.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]

    def dense(self) -> Tensor:
        """Return [outputs, columns] fp32."""
        outputs, columns = self.codes.shape
        scales = self.scales.repeat_interleave(self.block[0], 0)[:outputs]
        return self.codes.float() * scales.repeat_interleave(self.block[1], 1)[:, :columns]


def pack_scaled(weight: ScaledWeight) -> ScaledWeight:
    """Return the weight as `scaled_linear` takes it; here unchanged."""
    return weight


def scaled_linear(x: NormedRows, weight: ScaledWeight, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + bias in x's dtype; x is quantized in groups of as many columns as share a scale of W.

    A version may leave x dense where that is no slower.

    Args:
        x: [tokens, columns]; quantized already only where each output of W has one scale.
        weight: The weight.
        bias: [outputs].
    """
    if isinstance(x, QuantizedRows):
        codes, scales = x.codes, x.scales
    else:
        codes, scales = quantize_rows(x, weight.codes.dtype, weight.block[1])
    seen = codes.float() * scales.repeat_interleave(weight.block[1], 1)[:, : x.shape[1]]
    y = (seen @ weight.dense().T).to(x.dtype)
    return y if bias is None else y + bias


def scaled_linear_silu_and_mul(x: NormedRows, weight: ScaledWeight, bias: Tensor | None, out: Tensor) -> None:
    """Write silu of the first half of the outputs of `scaled_linear` times the second half to out."""
    silu_and_mul(scaled_linear(x, weight, bias), out)
