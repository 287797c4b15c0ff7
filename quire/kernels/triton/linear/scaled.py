"""Matrix products of 8-bit codes with scales: which kernel serves how many rows."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from quire.kernels.reference.scaled_linear import ScaledWeight
from quire.kernels.triton.activation import silu_and_mul
from quire.kernels.triton.launching.dependent_launch import can_overlap
from quire.kernels.triton.linear.gemm import GemmConfig
from quire.kernels.triton.linear.gemv import GemvConfig
from quire.kernels.triton.linear.nearest_shape import nearest
from quire.kernels.triton.linear.quantize_rows import quantize_rows
from quire.kernels.triton.linear.scaled_gemm import scaled_gemm
from quire.kernels.triton.linear.scaled_gemv import scaled_gemv
from quire.kernels.triton.linear.tuned_scaled_configs import GATED, LIBRARY_ROWS, MANY, PLAIN, UP_TO


def scaled_linear(x: Tensor, weight: ScaledWeight, bias: Tensor | None) -> Tensor:
    """Arguments as in reference/scaled_linear.py."""
    if _suits_library(x, weight):
        return _library_product(x, weight, bias)
    y = x.new_empty((x.shape[0], weight.codes.shape[0]))
    _multiply(x, weight, bias, y, gate=False)
    return y


def scaled_linear_silu_and_mul(x: Tensor, weight: ScaledWeight, bias: Tensor | None, out: Tensor) -> None:
    """Arguments as in reference/scaled_linear.py; with few rows all of it is one kernel beside that for x."""
    if x.shape[0] > UP_TO[-1]:
        silu_and_mul(scaled_linear(x, weight, bias), out)
    else:
        _multiply(x, weight, bias, out, gate=True)


def _suits_library(x: Tensor, weight: ScaledWeight) -> bool:
    """Whether torch's product of fp8 rows with scales takes it, and is the fastest."""
    outputs, columns = weight.codes.shape
    return (
        x.shape[0] >= LIBRARY_ROWS
        and weight.codes.dtype == torch.float8_e4m3fn
        and x.dtype == torch.bfloat16
        and weight.scales.shape[1] == 1
        and outputs % 16 == columns % 16 == 0
        and x.is_cuda
    )


def _library_product(x: Tensor, weight: ScaledWeight, bias: Tensor | None) -> Tensor:
    codes, scales = quantize_rows(x, weight.codes.dtype, x.shape[1])
    return torch._scaled_mm(
        codes, weight.codes.T, scales, weight.scales.T, bias=bias, out_dtype=x.dtype, use_fast_accum=True
    )


def _multiply(x: Tensor, weight: ScaledWeight, bias: Tensor | None, y: Tensor, gate: bool) -> None:
    if not x.shape[0]:
        return
    if x.stride(1) != 1:
        x = x.contiguous()
    config, overlap = (
        scaled_config(*weight.codes.shape, x.shape[0], weight.scales.shape[1] > 1, gate),
        can_overlap(x.device),
    )
    if isinstance(config, GemvConfig):
        scaled_gemv(x, weight, bias, y, config, gate, overlap)
    else:
        scaled_gemm(quantize_rows(x, weight.codes.dtype, weight.block[1]), weight, bias, y, config, gate, overlap)


@functools.cache
def scaled_config(outputs: int, columns: int, rows: int, blocked: bool, gate: bool) -> GemvConfig | GemmConfig:
    """The config for `rows` of x and a weight of this shape: that of the nearest shape, by the ratios of its sides."""
    if rows > UP_TO[-1]:
        return MANY
    table = GATED if gate else PLAIN
    size = next(number for number, most in enumerate(UP_TO) if rows <= most)
    return nearest(table, outputs, columns)[size]
