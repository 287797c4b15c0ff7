"""Matrix products on a GPU: own kernels for few rows and for large gated products on sm_90, cuBLAS for all else.

With few rows a product is bound by reading its weight, and cuBLAS reads at half to nine tenths of the memory's speed.
Which kernel serves which shape is a table of measured choices (tuned_configs.py). With many rows cuBLAS is as fast as
products can be, but does not apply gates.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.reference.quantized_rows import UnnormedRow
from quire.compute.kernels.triton.activation import silu_and_mul
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap
from quire.compute.kernels.triton.launching.device_properties import is_sm_90
from quire.compute.kernels.triton.linear.gated import gated_gemm, supports_gated_gemm
from quire.compute.kernels.triton.linear.gemm import GemmConfig, gemm
from quire.compute.kernels.triton.linear.gemv import GemvConfig, gemv, normed_gemv
from quire.compute.kernels.triton.linear.tuned_configs import TunedConfigs, read_configs
from quire.compute.kernels.triton.norm import rms_norm

LinearConfig = GemvConfig | GemmConfig | None
"""The kernel that multiplies, and how its work is divided into programs; None is cuBLAS."""
KERNELS: dict[str, type[GemvConfig | GemmConfig]] = {"gemv": GemvConfig, "gemm": GemmConfig}
"""The classes of configs, by the names that tables have for them."""
MAX_ROWS = 128
"""The maximum rows of x for which the table has configs; cuBLAS multiplies more."""
MANY_ROWS = 1024
"""The number of rows from which a gated product of a large weight is one kernel.

One kernel is 5 to 9 % faster than cuBLAS and a kernel for the gate, as tuning/h200/tune_gated.py measured. With fewer
rows it is not faster, and launching it, with three descriptors for the copy engine, takes the host 70 µs.
"""
NORMED_UP_TO = 16 * 2**20
"""The most elements of a weight whose product norms its row. Its kernel reads the row again for each program; 5,120 ×
2,880 takes 8.2 µs in place of 9.6, and 6,144 × 4,096 13.7 in place of 13.3 on an NVIDIA H200."""
FEW_OUTPUTS = 512
"""The most outputs of a product, such as a router's, of which each has a program of its own."""
LARGE_WEIGHT = (28_672, 4_096)
"""Outputs and columns of the smallest weight for which the kernel for gated products was measured."""


def pack_linear(weight: Tensor) -> Tensor:
    return weight


def linear(x: Tensor | UnnormedRow, packed: Tensor, bias: Tensor | None, *, waits_late: bool = False) -> Tensor:
    """Implement reference/linear.py's `linear`; with `waits_late`, it runs while the kernel launched last still runs.

    That kernel must release its dependents only after it has waited for x, and must write nothing that this product
    reads. The norm of an UnnormedRow is computed here, in the same kernel if there is one.
    """
    if isinstance(x, UnnormedRow):
        if (own := _config_with_norm(x, packed, gate=False)) is not None:
            y = x.new_empty((1, packed.shape[0]))
            normed_gemv(x, packed, bias, y, own, gate=False, overlap=can_overlap(y.device))
            return y
        x = x.dense(rms_norm)
    config = config_for(x, packed, gate=False)
    if config is None:
        return F.linear(x, packed, bias)
    y = x.new_empty((x.shape[0], packed.shape[0]))
    overlap = can_overlap(x.device)
    linear_with_config(x, packed, bias, y, config, gate=False, overlap=overlap, waits_late=waits_late)
    return y


def linear_silu_and_mul(x: Tensor | UnnormedRow, packed: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Implement reference/linear.py's op; with few rows, and with many, a single kernel applies the gate to sums in
    fp32. The norm of an UnnormedRow is computed here."""
    overlap = can_overlap(out.device)
    if isinstance(x, UnnormedRow):
        if (own := _config_with_norm(x, packed, gate=True)) is not None:
            normed_gemv(x, packed, bias, out, own, gate=True, overlap=overlap)
            return
        x = x.dense(rms_norm)
    if (
        bias is None
        and prefers_gated_gemm(x.shape[0], *packed.shape)
        and is_sm_90(x.device)
        and supports_gated_gemm(x, packed, out)
    ):
        gated_gemm(x, packed, out, overlap)
    elif (config := config_for(x, packed, gate=True)) is not None:
        linear_with_config(x, packed, bias, out, config, gate=True, overlap=overlap)
    else:
        silu_and_mul(linear(x, packed, bias), out)


def _config_with_norm(row: UnnormedRow, w: Tensor, gate: bool) -> GemvConfig | None:
    """Return the config of the kernel that norms and multiplies a row; None: its norm takes a kernel of its own, which
    is faster for large weights, or is there already."""
    outputs, columns = w.shape
    is_small = outputs * columns <= NORMED_UP_TO
    if row.normed is not None or not is_small or not isinstance(config_for(row.x, w, gate), GemvConfig):
        return None
    if gate:
        return GemvConfig(4, 512, 2)
    if outputs <= FEW_OUTPUTS:
        return GemvConfig(1, 2048, 4)
    return GemvConfig(4, 512 if columns <= 2048 else 1024, 4)


def prefers_gated_gemm(rows: int, outputs: int, columns: int) -> bool:
    """Whether the kernel for gated products of many rows is the fastest, for a weight [outputs, columns]."""
    return rows >= MANY_ROWS and outputs >= LARGE_WEIGHT[0] and columns >= LARGE_WEIGHT[1]


def linear_with_config(
    x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, config: GemvConfig | GemmConfig, *, gate: bool, overlap: bool,
    waits_late: bool = False,
) -> None:  # fmt: skip
    """Write x Wᵀ + bias to y, or silu of its first half times the second if `gate`, with this config.

    Args:
        x: [rows, columns], the columns side by side.
        w: [outputs, columns]; twice as many outputs if `gate`.
        bias: [outputs of w].
        y: [rows, outputs].
        config: A GemvConfig takes a single row of x.
        overlap: As in dependent_launch.
        waits_late: As in `gemm`; without effect for a GemvConfig.
    """
    if isinstance(config, GemvConfig):
        gemv(x, w, bias, y, config, gate, overlap)
    else:
        gemm(x, w, bias, y, config, gate, overlap, waits_late=waits_late)


def config_for(x: Tensor, w: Tensor, gate: bool) -> LinearConfig:
    """Return the config of the kernel that multiplies x [rows, columns] by w [outputs, columns]; None: cuBLAS."""
    rows = x.shape[0]
    if not 0 < rows <= MAX_ROWS or x.dtype == torch.float32 or x.stride(1) != 1 or not is_sm_90(x.device):
        return None
    return tuned_config(*w.shape, rows, gate)


@functools.cache
def tuned_config(outputs: int, columns: int, rows: int, gate: bool) -> LinearConfig:
    if columns % 16:
        return None  # rows of the weight do not begin at 16-byte addresses
    return dense_configs().config(outputs, columns, rows, gate)


@functools.cache
def dense_configs() -> TunedConfigs[GemvConfig | GemmConfig]:
    """Return the table for dense weights, read once; None as a config: cuBLAS, followed by a kernel for the gate."""
    return read_configs("bf16", KERNELS)
