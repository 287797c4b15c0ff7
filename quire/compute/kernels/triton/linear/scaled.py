"""Chooses the kernel for products of 8-bit codes with scales, by the number of rows."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from quire.compute.kernels.reference.linear import ScaledWeight
from quire.compute.kernels.reference.quantized_rows import NormedRows, QuantizedRows
from quire.compute.kernels.triton.activation import silu_and_mul
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap
from quire.compute.kernels.triton.launching.device_properties import is_sm_90, program_memory
from quire.compute.kernels.triton.launching.launch import cdiv
from quire.compute.kernels.triton.linear.gated import gated_gemm, supports_gated_gemm
from quire.compute.kernels.triton.linear.gemm import BLOCK_COLUMNS, GemmConfig, gemm
from quire.compute.kernels.triton.linear.gemv import GemvConfig, gemv, int8_gemv, supports_int8_gemv
from quire.compute.kernels.triton.linear.linear import KERNELS
from quire.compute.kernels.triton.linear.tuned_configs import TunedConfigs, read_configs
from quire.compute.kernels.triton.norm import quantize_rows

_BLOCKED_STAGES = 6
"""Stages of a GEMM whose scales are of blocks: its steps have half as many columns."""
MANY = GemmConfig(128, 128, 128, 1, 8, 5, True)
"""The config for products of many rows that torch's product does not take."""
FEWEST_TILES = 100
"""The minimum number of tiles of a gated product that keeps most of a GPU at work.

With fewer, the library's product and a kernel for the gate are faster. Llama-3.1-8B's product of 128 rows has 112.
"""


def scaled_linear(x: NormedRows, weight: ScaledWeight, bias: Tensor | None) -> Tensor:
    config = _config_for(x, weight, gate=False)
    if config is None:
        return _library_product(x, weight, bias)
    y = x.new_empty((x.shape[0], weight.codes.shape[0]))
    _multiply(x, weight, bias, y, config, gate=False)
    return y


def scaled_linear_silu_and_mul(x: NormedRows, weight: ScaledWeight, bias: Tensor | None, out: Tensor) -> None:
    """Implement reference/linear.py's op; in most cases one kernel follows the kernel that quantizes x."""
    config = _config_for(x, weight, gate=True)
    if config is None and bias is None and _suits_gated_gemm(x, weight, out):
        codes, scales = _codes(x, weight)
        gated_gemm(codes, weight.codes, out, can_overlap(out.device), (scales, weight.scales))
    elif config is None:
        silu_and_mul(scaled_linear(x, weight, bias), out)
    else:
        _multiply(x, weight, bias, out, config, gate=True)


def _config_for(x: NormedRows, weight: ScaledWeight, gate: bool) -> GemvConfig | GemmConfig | None:
    """Return the config of the kernel for x and the weight; None: the library's product."""
    rows = x.shape[0]
    if weight.codes.dtype == torch.int8:
        if rows == 1 and supports_int8_gemv(weight):
            return int8_row_config(*weight.codes.shape, gate)
        rows = max(rows, 2)  # the tensor cores take integers as they are; gemv would turn them into fp32
    config = scaled_config(*weight.codes.shape, rows, gate)
    if config is None:
        if _suits_library(x, weight):
            return None
        config = MANY
    if isinstance(config, GemvConfig):
        return config
    if weight.scales.shape[1] > 1 and config.block_k != BLOCK_COLUMNS:
        config = replace(config, block_k=BLOCK_COLUMNS, stages=_BLOCKED_STAGES)
    return fitting(config, program_memory(weight.codes.device))


@functools.cache
def scaled_config(outputs: int, columns: int, rows: int, gate: bool) -> GemvConfig | GemmConfig | None:
    return scaled_configs().config(outputs, columns, rows, gate)


@functools.cache
def int8_row_config(outputs: int, columns: int, gate: bool) -> GemvConfig | GemmConfig | None:
    """Return the config for one row of int8 codes, which int8_gemv multiplies."""
    return read_configs("int8_w8a8", KERNELS).config(outputs, columns, 1, gate)


@functools.cache
def scaled_configs() -> TunedConfigs[GemvConfig | GemmConfig]:
    """Return the table for fp8, read once, which also serves two rows and more of int8.

    None as a config stands for torch's product, `gated_gemm`, or MANY.
    """
    return read_configs("fp8_w8a8", KERNELS)


@functools.cache
def fitting(config: GemmConfig, memory: int) -> GemmConfig:
    """Return the config with as many stages as fit into `memory` bytes of a program's shared memory.

    The tables were measured where there are 227 KiB.
    """
    stage = (config.block_m + config.block_n) * config.block_k
    return config if config.stages * stage <= memory else replace(config, stages=memory // stage)


def _suits_library(x: NormedRows, weight: ScaledWeight) -> bool:
    """Whether torch's product of fp8 rows with scales takes x and the weight."""
    outputs, columns = weight.codes.shape
    return (
        weight.codes.dtype == torch.float8_e4m3fn
        and _library_writes(x.dtype, weight.codes.device)
        and weight.scales.shape[1] == 1
        and outputs % 16 == columns % 16 == 0
        and weight.codes.is_cuda
    )


@functools.cache
def _library_writes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's product writes this dtype: bf16 always, fp16 only from CUDA 12.9 and Hopper on, by cuBLAS."""
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return dtype == torch.bfloat16 or (dtype == torch.float16 and version >= (12, 9) and is_sm_90(device))


def _suits_gated_gemm(x: NormedRows, weight: ScaledWeight, out: Tensor) -> bool:
    """Whether there are so many tiles that the kernel for gated products of many rows is the fastest."""
    codes = x.codes if isinstance(x, QuantizedRows) else weight.codes  # rows are as far apart in both
    return (
        cdiv(out.shape[0], 128) * cdiv(out.shape[1], 128) >= FEWEST_TILES
        and is_sm_90(out.device)
        and supports_gated_gemm(codes, weight.codes, out)
    )


def _codes(x: NormedRows, weight: ScaledWeight) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of x, as `gemm` takes them; dense rows are quantized."""
    if isinstance(x, QuantizedRows):
        return x.codes, x.scales
    return quantize_rows(x if x.stride(1) == 1 else x.contiguous(), weight.codes.dtype, weight.block[1])


def _library_product(x: NormedRows, weight: ScaledWeight, bias: Tensor | None) -> Tensor:
    codes, scales = _codes(x, weight)
    return torch._scaled_mm(
        codes, weight.codes.T, scales, weight.scales.T, bias=bias, out_dtype=x.dtype, use_fast_accum=True
    )


def _multiply(
    x: NormedRows, weight: ScaledWeight, bias: Tensor | None, y: Tensor, config: GemvConfig | GemmConfig, gate: bool
) -> None:
    if not x.shape[0]:
        return
    overlap = can_overlap(y.device)
    if not isinstance(config, GemvConfig):
        gemm(_codes(x, weight), weight, bias, y, config, gate, overlap)
    elif weight.codes.dtype == torch.int8:
        int8_gemv(_codes(x, weight), weight, bias, y, config, gate, overlap)
    else:
        assert isinstance(x, Tensor)
        gemv(x if x.stride(1) == 1 else x.contiguous(), weight, bias, y, config, gate, overlap)
