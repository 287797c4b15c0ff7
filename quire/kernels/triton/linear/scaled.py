"""Matrix products of 8-bit codes with scales: which kernel serves how many rows."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.reference.scaled_linear import ScaledWeight
from quire.kernels.triton.activation import silu_and_mul
from quire.kernels.triton.launching.dependent_launch import can_overlap
from quire.kernels.triton.linear.gemm import GemmConfig
from quire.kernels.triton.linear.gemv import GemvConfig
from quire.kernels.triton.linear.nearest_shape import nearest
from quire.kernels.triton.linear.quantize_rows import quantize_rows
from quire.kernels.triton.linear.scaled_gemm import BLOCK_COLUMNS, scaled_gemm
from quire.kernels.triton.linear.scaled_gemv import scaled_gemv
from quire.kernels.triton.linear.tuned_scaled_configs import GATED, MANY, PLAIN, UP_TO

_BLOCKED_STAGES = 6
"""Of half as many columns a step."""


def scaled_linear(x: Tensor, weight: ScaledWeight, bias: Tensor | None) -> Tensor:
    """Arguments as in reference/scaled_linear.py."""
    config = _config_for(x, weight, gate=False)
    if config is None:
        return _library_product(x, weight, bias)
    y = x.new_empty((x.shape[0], weight.codes.shape[0]))
    _multiply(x, weight, bias, y, config, gate=False)
    return y


def scaled_linear_silu_and_mul(x: Tensor, weight: ScaledWeight, bias: Tensor | None, out: Tensor) -> None:
    """Arguments as in reference/scaled_linear.py; with few rows all of it is one kernel beside that for x."""
    config = _config_for(x, weight, gate=True)
    if config is None:
        silu_and_mul(scaled_linear(x, weight, bias), out)
    else:
        _multiply(x, weight, bias, out, config, gate=True)


def _config_for(x: Tensor, weight: ScaledWeight, gate: bool) -> GemvConfig | GemmConfig | None:
    """None is the library's product."""
    config = scaled_config(*weight.codes.shape, x.shape[0], gate)
    if config is None:
        return None if _suits_library(x, weight) else MANY
    if isinstance(config, GemmConfig) and weight.scales.shape[1] > 1 and config.block_k != BLOCK_COLUMNS:
        return replace(config, block_k=BLOCK_COLUMNS, stages=_BLOCKED_STAGES)
    return config


@functools.cache
def scaled_config(outputs: int, columns: int, rows: int, gate: bool) -> GemvConfig | GemmConfig | None:
    """The config for `rows` of x and a weight of this shape: that of the nearest shape, by the ratios of its sides."""
    if rows > UP_TO[-1]:
        return None
    size = next(number for number, most in enumerate(UP_TO) if rows <= most)
    return nearest(GATED if gate else PLAIN, outputs, columns)[size]


def _suits_library(x: Tensor, weight: ScaledWeight) -> bool:
    """Whether torch's product of fp8 rows with scales takes it."""
    outputs, columns = weight.codes.shape
    return (
        weight.codes.dtype == torch.float8_e4m3fn
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


def _multiply(
    x: Tensor, weight: ScaledWeight, bias: Tensor | None, y: Tensor, config: GemvConfig | GemmConfig, gate: bool
) -> None:
    if not x.shape[0]:
        return
    if x.stride(1) != 1:
        x = x.contiguous()
    overlap = can_overlap(x.device)
    if isinstance(config, GemvConfig):
        scaled_gemv(x, weight, bias, y, config, gate, overlap)
    else:
        scaled_gemm(quantize_rows(x, weight.codes.dtype, weight.block[1]), weight, bias, y, config, gate, overlap)
