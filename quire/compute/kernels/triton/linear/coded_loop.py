"""The inner loop of products with weights that are expanded as they are multiplied, of any scheme, on the tensor cores.

A step takes whole runs of 32 columns. Codes of 4 bits lie two to a byte, 16 columns apart (see GroupedWeight), so the
low halves of a run's bytes are its first columns and the high halves its last ones: each half is multiplied with the
same columns of x, and nothing is exchanged between threads. A scale is loaded once for a run, or for half of one.

The weight is the tensor core's first operand (see inner_loops.py), for these are products of few rows: 0.5 to 1 byte a
weight is read, and expanded in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.codebook_linear import CodebookWeight
from quire.compute.kernels.reference.grouped_linear import GroupedWeight

AnyCoded = GroupedWeight | CodebookWeight


class CodedArguments(NamedTuple):
    """What the kernels here are given of a weight of any scheme, or of several with one more dimension in front.

    Attributes:
        codes: [rows, columns] of 8 bits, or [rows, columns / 2] of 4.
        scales: [rows / scale_rows, groups], of any dtype; of e8m0 the bytes.
        zeros: Like scales, what is taken from codes; where there are none, anything.
        factors: [rows] fp32, on top of the scales; where there are none, anything.
        table: [16] fp32, what codes stand for where they are looked up; else anything.
        rows, columns: Of the weight.
        facts: What kernels are compiled for.
    """

    codes: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    factors: Tensor | None
    table: Tensor | None
    rows: int
    columns: int
    facts: dict[str, int | bool | str]
    scale_rows: int = 1


def coded_arguments(weight: AnyCoded) -> CodedArguments:
    """Of a weight in the reference's form, whose order of columns x is in already."""
    rows = weight.packed.shape[-2]
    if isinstance(weight, CodebookWeight):
        exponents = weight.scales.dtype == torch.float8_e8m0fnu
        scales = weight.scales.view(torch.uint8) if exponents else weight.scales
        factors = weight.table if weight.factors is None else weight.factors
        facts = facts_of(4, weight.group, exponents=exponents, factors=weight.factors is not None, values=weight.values)
        return CodedArguments(weight.packed, scales, scales, factors, weight.table, rows, weight.columns, facts)
    zeros = weight.scales if weight.zeros is None else weight.zeros
    facts = facts_of(weight.bits, weight.group, middle=weight.zeros is None, zeros=weight.zeros is not None)
    return CodedArguments(weight.packed, weight.scales, zeros, *(weight.scales,) * 2, rows, weight.columns, facts)


def facts_of(
    bits: int,
    group: int,
    *,
    middle: bool = False,
    zeros: bool = False,
    exponents: bool = False,
    factors: bool = False,
    values: str = "unsigned",
) -> dict[str, int | bool | str]:
    return {
        "BITS": bits,
        "GROUP": group,
        "MIDDLE": 1 << (bits - 1) if middle else 0,
        "ZEROS": zeros,
        "EXPONENTS": exponents,
        "FACTORS": factors,
        "VALUES": values,
    }


@triton.jit
def coded_loop(
    x, x_rows, x_mask, codes, scales, zeros, factors, table, rows, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, MIDDLE: tl.constexpr, ZEROS: tl.constexpr,
    EXPONENTS: tl.constexpr, FACTORS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] fp32: rows of x by rows of a weight.

    Args:
        x_rows, x_mask: Where each row of x begins, int64, and which there are; the others count as zeros.
        codes, scales, zeros, factors, table: See CodedArguments.
        rows: Of the weight, [BLOCK_N] int64.
    """
    RUNS: tl.constexpr = BLOCK_K // 32
    PART: tl.constexpr = 16 if BITS == 4 or GROUP % 32 != 0 else 32  # of a run, that is multiplied at once
    groups = tl.cdiv(columns, GROUP)
    code_rows = (rows * (columns // 2 if BITS == 4 else columns))[:, None, None]
    scale_rows = (rows * groups)[:, None]
    run = tl.arange(0, RUNS)
    place = tl.arange(0, PART)
    flat = tl.arange(0, RUNS * PART)
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for begin in range(0, columns, BLOCK_K):
        first = begin + run * 32
        there = (first < columns)[None, :]
        for half in tl.static_range(32 // PART):
            if BITS == 8:
                at = (first + half * PART)[:, None] + place[None, :]
                inside = (at < columns)[None, :, :]
                found = tl.load(codes + code_rows + at[None, :, :], inside, 0.0, eviction_policy="evict_first")
            else:
                if half == 0:
                    at = (first // 2)[:, None] + place[None, :]
                    inside = (at < columns // 2)[None, :, :]
                    stored = tl.load(codes + code_rows + at[None, :, :], inside, 0.0, eviction_policy="evict_first")
                found = (stored.to(tl.int32) >> (4 * half)) & 15
            k = begin + flat // PART * 32 + half * PART + flat % PART
            group = (first + half * PART) // GROUP
            own = scale_values(tl.load(scales + scale_rows + group[None, :], there, 0.0), EXPONENTS)
            values = code_values(found, table, VALUES)
            if ZEROS:
                zero = tl.load(zeros + scale_rows + group[None, :], there, 0.0).to(tl.float32)
                values -= zero[:, :, None]
            else:
                values -= MIDDLE
            w = tl.reshape(values * own[:, :, None], (BLOCK_N, RUNS * PART)).to(x.dtype.element_ty)
            a = tl.load(x + x_rows[:, None] + k[None, :], x_mask[:, None] & (k < columns)[None, :], 0.0)
            sums = tl.dot(w, tl.trans(a), sums, input_precision="ieee")
    if FACTORS:
        sums *= tl.load(factors + rows)[:, None]
    return tl.trans(sums)


@triton.jit
def scale_values(stored, EXPONENTS: tl.constexpr):
    """fp32, of scales as they are stored; EXPONENTS: the exponents of powers of two, biased as those of fp32."""
    if EXPONENTS:
        bits = tl.maximum(stored.to(tl.int32) << 23, 0x400000)  # 2^-127 is less than the least normal number
        return bits.to(tl.float32, bitcast=True)
    return stored.to(tl.float32)


@triton.jit
def code_values(codes, table, VALUES: tl.constexpr):
    """fp32, of codes: numbers without a sign, e2m1, or places in a table.

    Without conversions of integers, which GPUs do at an eighth of the rate of other operations: a number below 2^23 is
    what its bits are in the last places of 2^23, and e2m1's bits are those of an fp16 that is 2^14 times less.
    """
    if VALUES == "unsigned":
        values = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    elif VALUES == "e2m1":
        bits = codes.to(tl.int32)
        half = ((bits & 8) << 12) | ((bits & 7) << 9)
        values = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    else:
        values = _looked_up(codes.to(tl.int32), table)
    return values


@triton.jit
def _looked_up(bits, table):
    """table[bits], by selecting: loads from places that differ from thread to thread take longer."""
    values = tl.zeros_like(bits).to(tl.float32) + tl.load(table)
    for number in tl.static_range(1, 16):
        values = tl.where(bits == number, tl.load(table + number), values)
    return values
