"""The layout of 4-bit codes for kernels that expand them in registers, as the first operand of tensor cores.

The idea is Marlin's (Frantar et al. 2024, arXiv 2408.11743). For 16 rows and 128 columns, 256 words of eight codes each
lie side by side; a thread of a warp reads four words at a time and has all that it multiplies, so threads exchange
nothing. In a word, codes i and i + 4 belong to rows 8 apart, so one operation expands both.

Columns are permuted too: of each 32, the tensor core's place (s, c, l, e) has column (l, s, c, e), written as the bits
of their numbers, so that one thread's values of x lie side by side. `permute_columns` gives a kernel x in the tensor
core's order; it moves 4 bytes for each element of bf16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch

ROWS, COLUMNS, WORDS = 16, 128, 256
"""Rows, columns, and words of 32 bits of a tile."""
BITS = 4
FIRST_INTEGER = {torch.bfloat16: 128, torch.float16: 1024}
"""For each dtype, an integer from which on integers are neighbours: a code in its lowest bits adds that much."""


class PackedWeight(NamedTuple):
    """A weight of 4-bit codes: scale · (code - zero), a scale and a zero for each row and 128 columns.

    Attributes:
        words: [rows / 16, columns / 128, 256] int32.
        scales: [rows / 16, groups, 8, 2] in the dtype of x, bf16 or fp16: scales of rows 8 apart are neighbours.
        zeros: [rows / 16, groups, 8, 2], FIRST_INTEGER more than each zero; None: every zero is 8.
        rows, columns: The shape of the weight.
        gated: Eight rows of gates alternate with eight rows of ups.
        order: [columns] int64, which column of x each column of W multiplies; None: W's columns are in x's order.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    rows: int
    columns: int
    gated: bool
    order: Tensor | None


def pack_int4(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    gated: bool,
    order: Tensor | None,
    dtype: torch.dtype = torch.bfloat16,
) -> PackedWeight:
    """Pack codes [rows, columns] uint8, scales and zeros [rows, columns / 128], for products in `dtype`."""
    rows, columns = codes.shape
    if gated:
        codes, scales = _interleaved(codes), _interleaved(scales)
        zeros = None if zeros is None else _interleaved(zeros)
    shifted = None if zeros is None else _pairs(zeros.to(dtype) + FIRST_INTEGER[dtype])
    words = torch.cat([_words(part) for part in torch.split(codes, 4096)])
    return PackedWeight(words, _pairs(scales.to(dtype)), shifted, rows, columns, gated, order)


def pairs_of(x: Tensor) -> Tensor:
    """View x [rows, columns], 16-bit values, as pairs of columns [rows, columns / 2] int32; a copy if x is not
    aligned."""
    if x.stride(1) != 1 or x.stride(0) % 2 or x.storage_offset() % 2:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.int32)


def expansion(dtype: torch.dtype, *, scaled: bool) -> str:
    """Return PTX that expands two words of codes, $8 and $9, into eight pairs of floats, $0 to $7.

    A code in the lowest bits of FIRST_INTEGER is a float, from which a zero that is as much larger is subtracted. Codes
    4 apart belong to rows 8 apart, which have zeros of their own: pairs of equal zeros are $10 and $12. Where scaled,
    $10 and $12 are a pair of scales and a pair of zeros of such rows instead, and the floats are multiplied by the
    scales.
    """
    kind, integer = ("f16x2", "0x64006400") if dtype == torch.float16 else ("bf16x2", "0x43004300")
    zeros = ("z0", "z1") if scaled else ("$10", "$12")
    lines = [".reg .b32 a, s0, s1, z0, z1, t;"]
    if scaled:
        pairs = (("s0", "$10", "0x1010"), ("s1", "$10", "0x3232"), ("z0", "$12", "0x1010"), ("z1", "$12", "0x3232"))
        lines += [f"prmt.b32 {pair}, {both}, {both}, {half};" for pair, both, half in pairs]
    for number in range(8):
        word, place = f"${8 + number // 4}", number % 4
        if place:
            lines.append(f"shr.b32 a, {word}, {BITS * place};")
        lines.append(f"lop3.b32 t, {'a' if place else word}, 0x000F000F, {integer}, 0xEA;")
        lines.append(f"sub.rn.{kind} {'t' if scaled else f'${number}'}, t, {zeros[place % 2]};")
        if scaled:
            lines.append(f"mul.rn.{kind} ${number}, t, s{place % 2};")
    return "\n".join(["{", *lines, "}"])


def _interleaved(x: Tensor) -> Tensor:
    """Return [2 · outputs, …]: eight rows of the first half, eight of the second, and so on."""
    half = len(x) // 2
    return torch.stack((x[:half].view(half // 8, 8, -1), x[half:].view(half // 8, 8, -1)), 1).reshape(x.shape)


def _words(codes: Tensor) -> Tensor:
    """[rows, columns] → [rows / 16, columns / 128, 256] int32."""
    rows, columns = codes.shape
    # tile, h, 8 rows, group, half, ehi, l, s, c, e → tile, group, half, 8 rows, l, ehi, s; then e, c, h within a word
    parts = codes.view(rows // 16, 2, 8, columns // 128, 2, 2, 4, 2, 2, 2).permute(0, 3, 4, 2, 6, 5, 7, 9, 8, 1)
    parts = parts.reshape(-1, 4, 2).to(torch.uint8)  # two codes a byte, four bytes a word
    bytes_of_words = (parts[:, :, 0] | parts[:, :, 1] << BITS).contiguous()
    return bytes_of_words.view(torch.int32).view(rows // 16, columns // 128, WORDS)


def _pairs(x: Tensor) -> Tensor:
    """[rows, groups] → [rows / 16, groups, 8, 2]."""
    rows, groups = x.shape
    return x.view(rows // 16, 2, 8, groups).permute(0, 3, 2, 1).contiguous()


BLOCK, WARPS = 1_024, 4
"""Pairs of columns and warps of a program."""


def permute_columns(x: Tensor) -> Tensor:
    """Put the columns of x [rows, columns], 16-bit values, into the tensor core's order; contiguous."""
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
