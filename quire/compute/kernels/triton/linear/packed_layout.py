"""How 4-bit codes lie in memory for kernels that expand them in registers: as tensor cores take their first operand.

The idea is Marlin's (Frantar et al. 2024, arXiv 2408.11743). Of 16 rows and 128 columns, 256 words of eight codes each
are side by side; a thread of a warp reads four of them at a time and has what it multiplies, with no exchange between
threads. In a word, codes i and i + 4 are those of rows 8 apart, so one operation expands both: see `BITS`.

Columns are permuted as well: of each 32, the tensor core's place (s, c, l, e) has column (l, s, c, e), written as the
bits of their numbers; so one thread's values of x lie side by side. A kernel that takes x in the tensor core's order
has it from `permuted`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROWS, COLUMNS, WORDS = 16, 128, 256
"""Of a tile: rows, columns, and words of 32 bits."""
BITS = 4
FIRST_INTEGER = {torch.bfloat16: 128, torch.float16: 1024}
"""By dtype: where integers are neighbours, so that a code in the lowest bits is so much more than the code."""


class PackedWeight(NamedTuple):
    """A weight of 4-bit codes: scale · (code - zero), a scale and a zero for each row and 128 columns.

    Attributes:
        words: [rows / 16, columns / 128, 256] int32.
        scales: [rows / 16, groups, 8, 2] in the dtype of what is multiplied with it, bf16 or fp16: those of rows 8
            apart are neighbours.
        zeros: As `scales`, FIRST_INTEGER more than each zero; None: every zero is 8.
        rows, columns: Of the weight.
        gated: Its rows are gates and ups in turn, eight by eight; outputs in their own order are gates, then ups.
        order: [columns] int64, which column of x stands where; None: x's own.
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
    """The weight from codes [rows, columns] uint8, scales and zeros [rows, columns / 128], for products in `dtype`."""
    rows, columns = codes.shape
    if gated:
        codes, scales = _interleaved(codes), _interleaved(scales)
        zeros = None if zeros is None else _interleaved(zeros)
    shifted = None if zeros is None else _pairs(zeros.to(dtype) + FIRST_INTEGER[dtype])
    words = torch.cat([_words(part) for part in torch.split(codes, 4096)])
    return PackedWeight(words, _pairs(scales.to(dtype)), shifted, rows, columns, gated, order)


def permuted(x: Tensor) -> Tensor:
    """[rows, columns] of 16-bit values → the same in the tensor core's order of columns, contiguous."""
    pairs = pairs_of(x).reshape(len(x), -1, 4, 4)  # [rows, of 32 columns, l, s and c]
    return pairs.transpose(2, 3).contiguous().view(len(x), -1).view(x.dtype)


def pairs_of(x: Tensor) -> Tensor:
    """Pairs of columns of x [rows, columns] of 16 bits, [rows, columns / 2] int32; a copy where x lies otherwise."""
    if x.stride(1) != 1 or x.stride(0) % 2 or x.storage_offset() % 2:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.int32)


def _interleaved(x: Tensor) -> Tensor:
    """[2 · outputs, …]: eight rows of the first half, eight of the second, and so on."""
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
