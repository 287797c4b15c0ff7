"""Which kernel multiplies a packed 4-bit weight fastest, by its shape and the rows of x.

Measured on an NVIDIA H200 by tuning/h200/tune_packed.py.
"""

from __future__ import annotations

from quire.kernels.triton.linear.packed_gemm import PackedGemmConfig
from quire.kernels.triton.linear.packed_gemv import PackedGemvConfig

UP_TO = (8, 16, 32, 64, 128, 256)
"""Rows of x: a config serves this many and fewer. For more the weight is expanded."""

TABLE: dict[tuple[int, int], tuple[PackedGemvConfig | PackedGemmConfig, ...]] = {
    (6144, 4096): (
        PackedGemvConfig(8, 4, 8, 1),
        PackedGemvConfig(16, 4, 4, 1),
        PackedGemmConfig(32, 1, 4, 4),
        PackedGemmConfig(64, 1, 4, 2),
        PackedGemmConfig(128, 2, 4, 2),
        PackedGemmConfig(128, 2, 4, 1),
    ),
    (4096, 4096): (
        PackedGemvConfig(8, 4, 8, 1),
        PackedGemvConfig(16, 4, 4, 1),
        PackedGemmConfig(32, 1, 4, 4),
        PackedGemmConfig(64, 1, 4, 4),
        PackedGemmConfig(128, 1, 4, 2),
        PackedGemmConfig(128, 1, 4, 1),
    ),
    (28672, 4096): (
        PackedGemvConfig(8, 4, 4, 1),
        PackedGemvConfig(16, 1, 2, 1),
        PackedGemmConfig(32, 1, 4, 1),
        PackedGemmConfig(64, 2, 4, 1),
        PackedGemmConfig(128, 2, 4, 1),
        PackedGemmConfig(128, 2, 4, 1),
    ),
    (4096, 14336): (
        PackedGemvConfig(8, 4, 8, 1),
        PackedGemvConfig(16, 4, 8, 1),
        PackedGemmConfig(32, 1, 4, 8),
        PackedGemmConfig(64, 1, 4, 4),
        PackedGemmConfig(128, 2, 4, 4),
        PackedGemmConfig(128, 2, 4, 2),
    ),
}
"""(outputs, columns) of the weight → a config for each of UP_TO."""
