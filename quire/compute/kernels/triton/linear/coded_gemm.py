"""Computes y = x Wᵀ for few rows of x, with codes in the reference's form that are expanded as they are multiplied.

These kernels serve codes that no other kernel reads directly: groups of 16, 32 and 64 columns, 8-bit integers in
groups, and e2m1. Tiles are as in gemm.py, without splits.

A step takes whole runs of 32 columns. A byte has two 4-bit codes, 16 columns apart, so the low halves of a run's bytes
are its first columns and the high halves its last ones. Each half is multiplied with the same columns of x, and threads
exchange nothing. A scale is loaded once for a run, or for half of one. The weight is the tensor core's first operand
(see inner_loops.py), because these products have few rows: 0.5 to 1 byte is read for each value of the weight, and
expanded in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.linear import CodebookWeight, GroupedWeight
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch
from quire.compute.kernels.triton.linear.gemm import tile_at, write_tile


@dataclass(frozen=True)
class CodedConfig:
    """How the work is divided into programs.

    Attributes:
        block_m, block_n, block_k: Rows of x, rows of W (gates and ups together where the product is gated) and columns
            of a tile; 32 divides the columns.
        warps: Warps of a program.
        stages: Tiles under way at the same time.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


CONFIG = CodedConfig(16, 16, 128, 2, 4)
"""The config that was the fastest on an NVIDIA H200 (docs/performance.md)."""
MAX_ROWS = CONFIG.block_m
"""The maximum number of rows of x; with more, it costs less to expand the weight once."""


def suits(x: Tensor, weight: AnyCoded) -> bool:
    """Whether these kernels cost less than expanding the weight: x has few rows, and codes need no look-up."""
    return x.shape[0] <= MAX_ROWS and not (isinstance(weight, CodebookWeight) and weight.values != "e2m1")


def coded_linear(x: Tensor, weight: AnyCoded, bias: Tensor | None, y: Tensor, gate: bool) -> None:
    """Write x Wᵀ + bias to y, or silu of its first half times the second if `gate`.

    Args:
        x: [rows, columns], few rows.
        y: [rows, outputs], contiguous.
    """
    if not len(x):
        return
    coded_gemm(x if x.stride(1) == 1 else x.contiguous(), weight, bias, y, CONFIG, gate, can_overlap(x.device))


def coded_gemm(
    x: Tensor, weight: AnyCoded, bias: Tensor | None, y: Tensor, config: CodedConfig, gate: bool, overlap: bool
) -> None:
    """Compute `coded_linear` with this config; `overlap` as in dependent_launch."""
    rows, outputs = y.shape
    w = coded_arguments(weight)
    tiles = cdiv(outputs, config.block_n // 2 if gate else config.block_n) * cdiv(rows, config.block_m)
    _coded_kernel[(tiles,)](
        x, w.codes, w.scales, w.zeros, w.factors, w.table, w.scales if bias is None else bias, y,
        rows, outputs, w.columns, x.stride(0),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GATED=gate, BIASED=bias is not None,
        OVERLAP=overlap, **w.facts, num_warps=config.warps, num_stages=config.stages, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _coded_kernel(
    x, codes, scales, zeros, factors, table, bias, y, rows, outputs, columns, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    OVERLAP: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, MIDDLE: tl.constexpr, ZEROS: tl.constexpr,
    EXPONENTS: tl.constexpr, FACTORS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    begin, m, w_rows = tile_at(tl.program_id(0), tl.cdiv(rows, BLOCK_M), outputs, BLOCK_M, BLOCK_N, GATED)
    wait_for_inputs(OVERLAP)
    sums = coded_loop(
        x, m.to(tl.int64) * x_stride, m < rows, codes, scales, zeros, factors, table, w_rows, columns,
        BLOCK_M, BLOCK_N, BLOCK_K, BITS, GROUP, MIDDLE, ZEROS, EXPONENTS, FACTORS, VALUES,
    )  # fmt: skip
    write_tile(sums, bias, y, m, w_rows, begin, rows, outputs, BLOCK_M, BLOCK_N, GATED, BIASED)


AnyCoded = GroupedWeight | CodebookWeight


class CodedArguments(NamedTuple):
    """The kernels' arguments for a weight of any scheme, or for several weights with a leading dimension.

    Attributes:
        codes: [rows, columns] 8-bit codes, or [rows, columns / 2] 4-bit codes.
        scales: [rows / scale_rows, groups], of any dtype; the bytes of e8m0.
        zeros: [rows / scale_rows, groups], which are subtracted from codes; unused where there are none.
        factors: [rows] fp32, which multiply the scales; unused where there are none.
        table: [16] fp32, the values of codes that are looked up; unused otherwise.
        rows, columns: The shape of the weight.
        facts: The constants that kernels are compiled for.
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
    """Return the arguments for a weight in the reference's form; x has its columns in the weight's order."""
    rows = weight.packed.shape[-2]
    if isinstance(weight, CodebookWeight):
        exponents = weight.scales.dtype == torch.float8_e8m0fnu
        scales = weight.scales.view(torch.uint8) if exponents else weight.scales
        factors = weight.table if weight.factors is None else weight.factors
        values = "mxfp4" if is_mxfp4(weight) and has_bf16_pairs(scales.device) else weight.values
        facts = facts_of(4, weight.group, EXPONENTS=exponents, FACTORS=weight.factors is not None, VALUES=values)
        return CodedArguments(weight.packed, scales, scales, factors, weight.table, rows, weight.columns, facts)
    zeros, middle = (weight.scales, 1 << weight.bits - 1) if weight.zeros is None else (weight.zeros, 0)
    facts = facts_of(weight.bits, weight.group, MIDDLE=middle, ZEROS=weight.zeros is not None)
    return CodedArguments(weight.packed, weight.scales, zeros, *(weight.scales,) * 2, rows, weight.columns, facts)


def is_mxfp4(weight: CodebookWeight) -> bool:
    """Whether the weight's codes are e2m1, and its scales powers of two of 32 columns."""
    exponents = weight.scales.dtype == torch.float8_e8m0fnu
    return exponents and weight.values == "e2m1" and weight.group == 32 and weight.factors is None


def has_bf16_pairs(device: torch.device) -> bool:
    """Whether the GPU multiplies two bf16 at a time."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def facts_of(bits: int, group: int, **others: int | bool | str) -> dict[str, int | bool | str]:
    """Return the constants for a weight of unsigned codes without zeros, overridden by `others`."""
    facts: dict[str, int | bool | str] = {"BITS": bits, "GROUP": group, "MIDDLE": 0, "ZEROS": False}
    return {**facts, "EXPONENTS": False, "FACTORS": False, "VALUES": "unsigned", **others}


@triton.jit
def coded_loop(
    x, x_rows, x_mask, codes, scales, zeros, factors, table, rows, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, MIDDLE: tl.constexpr, ZEROS: tl.constexpr,
    EXPONENTS: tl.constexpr, FACTORS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Return [BLOCK_M, BLOCK_N] fp32: products of rows of x and rows of a weight.

    Args:
        x_rows, x_mask: Where each row of x begins, int64, and which rows exist; the others count as zeros.
        codes, scales, zeros, factors, table: As in CodedArguments.
        rows: Rows of the weight, [BLOCK_N] int64.
    """
    if VALUES == "mxfp4" and x.dtype.element_ty == tl.bfloat16:
        return micro_loop(x, x_rows, x_mask, codes, scales, rows, columns, BLOCK_M, BLOCK_N, BLOCK_K)
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
def micro_loop(
    x, x_rows, x_mask, codes, scales, rows, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the result of `coded_loop` for mxfp4 and x in bf16; codes are expanded two at a time."""
    RUNS: tl.constexpr = BLOCK_K // 32
    run, place, flat = tl.arange(0, RUNS), tl.arange(0, 16), tl.arange(0, RUNS * 16)
    code_rows, scale_rows = (rows * (columns // 2))[:, None, None], (rows * (columns // 32))[:, None]
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for begin in range(0, columns, BLOCK_K):
        first = begin + run * 32
        there = first < columns
        at = (first // 2)[:, None] + place[None, :]
        stored = tl.load(codes + code_rows + at[None, :, :], there[None, :, None], 0, eviction_policy="evict_first")
        exponents = tl.load(scales + scale_rows + (begin // 32 + run)[None, :], there[None, :], 0)
        low, high = micro_values(stored, exponents[:, :, None])
        k = begin + flat // 16 * 32 + flat % 16
        inside = x_mask[:, None] & (k < columns)[None, :]
        a = tl.load(x + x_rows[:, None] + k[None, :], inside, 0.0)
        sums = tl.dot(tl.reshape(low, (BLOCK_N, RUNS * 16)), tl.trans(a), sums)
        b = tl.load(x + x_rows[:, None] + (k + 16)[None, :], inside, 0.0)
        sums = tl.dot(tl.reshape(high, (BLOCK_N, RUNS * 16)), tl.trans(b), sums)
    return tl.trans(sums) * 9223372036854775808.0


@triton.jit
def micro_values(stored, exponents):
    """Return the values of the low and of the high codes of bytes of e2m1, 2^-63 times, in bf16.

    The last three bits of a code, as those of a bf16, are 2^-126 times the value: the product with a scale, two at a
    time, is exact. The factor keeps scales from 2^-60 to 2^64 within bf16.

    Args:
        stored: [rows, runs, 16] uint8; neighbouring bytes lie in one thread.
        exponents: [rows, runs, 1] uint8, of the scales.
    """
    scale = (tl.minimum(exponents.to(tl.int32) + 63, 254) << 7).to(tl.int16)
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 w, s, none;
        mov.b32 none, 0x80008000;
        prmt.b32 w, $4, 0, 0x3120;
        shl.b32 s, w, 12;
        and.b32 s, s, 0x80008000;
        shl.b32 $0, w, 6;
        lop3.b32 $0, $0, 0x01C001C0, s, 0xEA;
        fma.rn.bf16x2 $0, $0, $5, none;
        shl.b32 s, w, 4;
        and.b32 s, s, 0x80008000;
        shr.u32 $1, w, 2;
        lop3.b32 $1, $1, 0x01C001C0, s, 0xEA;
        fma.rn.bf16x2 $1, $1, $6, none;
        shl.b32 s, w, 8;
        and.b32 s, s, 0x80008000;
        shl.b32 $2, w, 2;
        lop3.b32 $2, $2, 0x01C001C0, s, 0xEA;
        fma.rn.bf16x2 $2, $2, $5, none;
        and.b32 s, w, 0x80008000;
        shr.u32 $3, w, 6;
        lop3.b32 $3, $3, 0x01C001C0, s, 0xEA;
        fma.rn.bf16x2 $3, $3, $6, none;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r",
        [stored, tl.broadcast_to(scale, stored.shape)],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def scale_values(stored, EXPONENTS: tl.constexpr):
    """Return stored scales as fp32; EXPONENTS: they are exponents of powers of two, biased as those of fp32."""
    if EXPONENTS:
        bits = tl.maximum(stored.to(tl.int32) << 23, 0x400000)  # 2^-127 is less than the least normal number
        return bits.to(tl.float32, bitcast=True)
    return stored.to(tl.float32)


@triton.jit
def code_values(codes, table, VALUES: tl.constexpr):
    """Return the values of codes in fp32: unsigned integers, e2m1, or indices of a table.

    Integers are not converted, because GPUs do that at an eighth of the rate of other operations. A number below 2^23
    equals its bits in the last places of 2^23, and e2m1's bits are those of an fp16 that is 2^14 times less.
    """
    if VALUES == "unsigned":
        values = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    elif VALUES == "e2m1" or VALUES == "mxfp4":
        bits = codes.to(tl.int32)
        half = ((bits & 8) << 12) | ((bits & 7) << 9)
        values = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    else:
        values = _looked_up(codes.to(tl.int32), table)
    return values


@triton.jit
def _looked_up(bits, table):
    """Return table[bits] by selecting: loads from places that differ from thread to thread take longer."""
    values = tl.zeros_like(bits).to(tl.float32) + tl.load(table)
    for number in tl.static_range(1, 16):
        values = tl.where(bits == number, tl.load(table + number), values)
    return values
