"""The layout of mxfp4 experts on Hopper: codes that threads expand in registers, as the first operand of tensor cores.

Tiles are those of packed_layout.py, of 16 rows and 64 columns: 128 words of eight codes lie side by side, a thread of a
warp reads four words at a time, and columns of x are permuted in the same way. Of a pair of gate and up, a tile has
eight rows each.

Each half of a word has four codes, of two columns in the two halves. Their bits are spread so that few operations move
a code to where bf16 has its sign, its last two exponent bits and its first mantissa bit. Such a bf16 is 2^-126 times
the code's value, and one product with a scale that is 2^63 times as large makes a value that is 2^-63 times that of the
weight, for two codes at once and without rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.linear import CodebookWeight
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, next_power_of_2

ROWS, COLUMNS, WORDS = 16, 64, 128
"""Rows, columns, and words of 32 bits of a tile."""
ROWS_OF_WARPGROUP = 64
"""Rows of the smallest tile that Hopper's matrix units take, which must divide a weight's rows."""
LESS = 63
"""The power of two by which expanded values are less than the weight's."""


class PackedExperts(NamedTuple):
    """The weights of all experts in mxfp4.

    Attributes:
        words: [experts, rows / 16, columns / 64, 128] int32.
        scales: [experts, rows / 16, columns / 64, 8] int32; the bytes of a word are exponents of two runs of 32
            columns, each with those of two rows 8 apart, and stand for bf16 powers of two that are 2^63 times as large.
        rows, columns: The shape of an expert's weight.
        gated: Eight rows of gates alternate with eight rows of ups.
    """

    words: Tensor
    scales: Tensor
    rows: int
    columns: int
    gated: bool


def can_be_packed(weight: CodebookWeight) -> bool:
    """Whether tiles divide the weight [experts, rows, columns]."""
    return weight.packed.shape[1] % ROWS_OF_WARPGROUP == weight.columns % COLUMNS == 0


def pack_mxfp4(weight: CodebookWeight, gated: bool) -> PackedExperts:
    """Pack mxfp4 weights [experts, rows, columns] for which `can_be_packed` is true."""
    (experts, rows, _), columns = weight.packed.shape, weight.columns
    strips, units = rows // ROWS, columns // COLUMNS
    words = torch.empty((experts, strips, units, WORDS), dtype=torch.int32, device=weight.packed.device)
    _pack_words[(experts * strips, cdiv(units, _UNITS))](
        weight.packed, words, STRIPS=strips, UNITS=units, GATED=gated, BLOCK=_UNITS, num_warps=4
    )
    exponents = (weight.scales.view(torch.uint8).to(torch.int16) + LESS).clamp_(max=254).to(torch.uint8)
    if gated:
        exponents = exponents.view(experts, 2, strips, 8, units, 2).permute(0, 2, 4, 3, 5, 1)
    else:
        exponents = exponents.view(experts, strips, 2, 8, units, 2).permute(0, 1, 4, 3, 5, 2)
    scales = exponents.reshape(experts, strips, units, 32).view(torch.int32)
    return PackedExperts(words, scales, rows, columns, gated)


_UNITS = 8
"""Tiles that a program packs."""


@triton.jit
def _pack_words(packed, words, STRIPS: tl.constexpr, UNITS: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """Pack BLOCK tiles of 16 rows, of codes that `pack_nibbles` packed."""
    expert, strip = (tl.program_id(0) // STRIPS).to(tl.int64), tl.program_id(0) % STRIPS
    unit = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    word = tl.arange(0, 128)[None, :]
    row, lane, run, s = word // 16, word // 4 % 4, word // 2 % 2, word % 2
    made = tl.zeros((BLOCK, 128), tl.int32)
    for place in tl.static_range(4):
        if GATED:
            own = strip * 8 + row + place % 2 * (STRIPS * 8)
        else:
            own = strip * 16 + row + place % 2 * 8
        at = unit * 32 + run * 16 + lane % 2 * 8 + s * 4 + place // 2 * 2
        from_row = packed + (expert * (STRIPS * 16) + own) * (UNITS * 32)
        for e in tl.static_range(2):
            byte = tl.load(from_row + at + e, unit < UNITS, 0).to(tl.int32)
            code = (byte >> (lane // 2 * 4)) & 15
            if place == 0:
                spread = ((code & 8) << 12) | ((code & 7) << 6)
            elif place == 1:
                spread = ((code & 8) << 6) | (code & 7)
            elif place == 2:
                spread = ((code & 8) << 8) | ((code & 7) << 12)
            else:
                spread = ((code & 8) << 7) | ((code & 7) << 3)
            made |= spread << (16 * e)
    to = words + ((expert * STRIPS + strip) * UNITS + unit) * 128 + word
    tl.store(to, made, unit < UNITS)


def expansion() -> str:
    """Return PTX that expands a thread's four words of a tile, $16 to $19, into sixteen pairs of bf16, $0 to $15.

    $20 has the four exponents. Word number 2 · run + s, place p is pair number 2 · (4 · s + p) + run.
    """
    mask, signs, values = "0x81C081C0", "0x80008000", "0x01C001C0"
    lines = [".reg .b32 t, v, none, s0, s1, s2, s3;", f"mov.b32 none, {signs};"]
    for number in range(4):
        lines += [f"prmt.b32 s{number}, $20, 0, 0x4{number}4{number};", f"shl.b32 s{number}, s{number}, 7;"]
    apart = {2: ("shl.b32 t, {0}, 4;", "shr.u32 v, {0}, 6;"), 3: ("shl.b32 t, {0}, 5;", "shl.b32 v, {0}, 3;")}
    for word in range(4):
        run, s, name = word // 2, word % 2, f"${16 + word}"
        for place in range(4):
            if place == 0:
                lines.append(f"and.b32 v, {name}, {mask};")
            elif place == 1:
                lines += [f"shl.b32 v, {name}, 6;", f"and.b32 v, v, {mask};"]
            else:
                lines += [each.format(name) for each in apart[place]]
                lines += [f"and.b32 t, t, {signs};", f"lop3.b32 v, v, {values}, t, 0xEA;"]
            lines.append(f"fma.rn.bf16x2 ${2 * (4 * s + place) + run}, v, s{2 * run + place % 2}, none;")
    return "\n".join(["{", *lines, "}"])


def gather_rows(x: Tensor, order: Tensor, chosen: int) -> Tensor:
    """Return the rows of x that pairs have, [pairs, columns] in the order of the pairs and of the tensor core.

    Args:
        x: [tokens, columns], 16-bit values, contiguous.
        order: [pairs] int32, as `group_by_expert` returns it. Rows of undefined entries are undefined.
        chosen: The number of pairs of a token.
    """
    pairs, columns = len(order), x.shape[1]
    out = torch.empty((pairs, columns), dtype=x.dtype, device=x.device)
    overlap, rows = can_overlap(x.device), 4 if pairs >= _MANY else 1
    _gather_rows[(cdiv(pairs, rows),)](
        x.view(torch.int32), order, out.view(torch.int32), pairs, CHOSEN=chosen, PAIRS=columns // 2, ROWS=rows,
        BLOCK=next_power_of_2(columns // 2), OVERLAP=overlap, num_warps=4 * rows, launch_pdl=overlap,
    )  # fmt: skip
    return out


_MANY = 4_096
"""From this many pairs on, a program gathers several rows."""


@fast_launch
@triton.jit(do_not_specialize=["pairs"])
def _gather_rows(
    x, order, out, pairs, CHOSEN: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    row, to = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    wait_for_inputs(OVERLAP)
    pair = tl.load(order + row, row < pairs, -1)
    inside = ((pair >= 0) & (pair < pairs))[:, None] & (to < PAIRS)[None, :]
    found = tl.load(x + (pair // CHOSEN).to(tl.int64)[:, None] * PAIRS + to[None, :], inside, 0)
    # of 16 pairs, (s and c, l) has (l, s and c)
    permuted = tl.permute(tl.reshape(found, (ROWS, BLOCK // 16, 4, 4)), (0, 1, 3, 2))
    tl.store(out + row.to(tl.int64)[:, None] * PAIRS + to[None, :], tl.reshape(permuted, (ROWS, BLOCK)), inside)
