"""Chooses the kernel for a weight of integers in groups or codes of sixteen values, and the rows of x.

4-bit integers in groups of 128 columns or more are packed, and multiplied in that form for up to some thousand rows of
x. coded_gemm.py multiplies other integers and e2m1 for up to 16 rows. In all other cases the weight is expanded to a
temporary dense one.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.reference import linear as reference
from quire.compute.kernels.reference.linear import CodebookWeight, GroupedWeight
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap
from quire.compute.kernels.triton.launching.device_properties import is_sm_90
from quire.compute.kernels.triton.linear.coded_gemm import AnyCoded, coded_linear, suits
from quire.compute.kernels.triton.linear.linear import linear_silu_and_mul
from quire.compute.kernels.triton.linear.packed_expand import expand_codebook, expand_grouped, expand_packed
from quire.compute.kernels.triton.linear.packed_gemm import PackedGemmConfig, packed_gemm
from quire.compute.kernels.triton.linear.packed_gemm_many import PackedGemmManyConfig, packed_gemm_many
from quire.compute.kernels.triton.linear.packed_gemv import PackedGemvConfig, packed_gemv
from quire.compute.kernels.triton.linear.packed_layout import (
    COLUMNS,
    FIRST_INTEGER,
    PackedWeight,
    pack_int4,
    permute_columns,
)
from quire.compute.kernels.triton.linear.tuned_configs import TunedConfigs, read_configs

PackedConfig = PackedGemvConfig | PackedGemmConfig | PackedGemmManyConfig
KERNELS: dict[str, type[PackedConfig]] = {
    "gemv": PackedGemvConfig,
    "gemm": PackedGemmConfig,
    "gemm_many": PackedGemmManyConfig,
}
"""The classes of configs, by the names that the table has for them."""
MAX_ROWS = 4096
"""The maximum rows of x for which the table has configs; with more, the weight is expanded."""
_ROW_TILE = 128
"""Rows of the largest tile of a weight, which must divide the weight's rows."""
pack_codebook = reference.pack_codebook


def pack_grouped(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int, order: Tensor | None, gated: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> PackedWeight | GroupedWeight:  # fmt: skip
    rows, columns = codes.shape
    fits = bits == 4 and group % COLUMNS == columns % COLUMNS == rows % _ROW_TILE == 0
    if fits and dtype in FIRST_INTEGER and is_sm_90(codes.device):
        parts = group // COLUMNS  # of a group, each with the same scale
        zeros = None if zeros is None else zeros.repeat_interleave(parts, 1)
        return pack_int4(codes, scales.repeat_interleave(parts, 1), zeros, gated, order, dtype)
    return reference.pack_grouped(codes, scales, zeros, bits, group, order, gated)


def grouped_linear(x: Tensor, weight: PackedWeight | AnyCoded, bias: Tensor | None) -> Tensor:
    x, config = _in_order(x, weight), _config_for(x, weight, gate=False)
    if not isinstance(weight, PackedWeight) and suits(x, weight):
        y = x.new_empty((x.shape[0], len(weight.packed)))
        coded_linear(x, weight, bias, y, gate=False)
        return y
    if config is None:
        return F.linear(x, _expanded(weight, x.dtype), bias)
    assert isinstance(weight, PackedWeight)
    y = x.new_empty((x.shape[0], weight.rows))
    _multiply(x, weight, y, config)
    return y if bias is None else y.add_(bias)


def grouped_linear_silu_and_mul(x: Tensor, weight: PackedWeight | AnyCoded, bias: Tensor | None, out: Tensor) -> None:
    """Implement reference/linear.py's op; a packed weight without a bias takes a single kernel."""
    x, config = _in_order(x, weight), _config_for(x, weight, gate=True)
    if not isinstance(weight, PackedWeight) and suits(x, weight):
        coded_linear(x, weight, bias, out, gate=True)
    elif config is None or bias is not None:
        linear_silu_and_mul(x, _expanded(weight, x.dtype), bias, out)
    else:
        assert isinstance(weight, PackedWeight)
        _multiply(x, weight, out, config)


codebook_linear, codebook_linear_silu_and_mul = grouped_linear, grouped_linear_silu_and_mul


def _in_order(x: Tensor, weight: PackedWeight | AnyCoded) -> Tensor:
    if isinstance(weight, CodebookWeight) or weight.order is None:
        return x
    return x.index_select(1, weight.order)


def _config_for(x: Tensor, weight: PackedWeight | AnyCoded, gate: bool) -> PackedConfig | None:
    """Return the config of the kernel that takes the packed weight; None: no kernel takes it."""
    if not isinstance(weight, PackedWeight) or weight.gated != gate:
        return None
    if not 0 < x.shape[0] <= MAX_ROWS or x.dtype != weight.scales.dtype:
        return None
    return packed_config(weight.rows, weight.columns, x.shape[0])


@functools.cache
def packed_config(outputs: int, columns: int, rows: int) -> PackedConfig | None:
    return packed_configs().config(outputs, columns, rows, gate=False)


@functools.cache
def packed_configs() -> TunedConfigs[PackedConfig]:
    """Return the table for packed weights, gated or not, read once; None as a config: the weight is expanded."""
    return read_configs("int4_w4a16", KERNELS)


def _multiply(x: Tensor, weight: PackedWeight, y: Tensor, config: PackedConfig) -> None:
    overlap = can_overlap(x.device)
    if isinstance(config, PackedGemvConfig):
        packed_gemv(x, weight, y, config, overlap)
    elif isinstance(config, PackedGemmConfig):
        packed_gemm(permute_columns(x), weight, y, config, overlap)
    else:
        packed_gemm_many(permute_columns(x), weight, y, config, overlap)


def _expanded(weight: PackedWeight | AnyCoded, dtype: torch.dtype) -> Tensor:
    if isinstance(weight, PackedWeight):
        return expand_packed(weight, dtype)
    return expand_grouped(weight, dtype) if isinstance(weight, GroupedWeight) else expand_codebook(weight, dtype)
