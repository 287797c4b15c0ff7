"""Which kernel multiplies a packed 4-bit weight fastest, by its shape and the rows of x.

Measured on an NVIDIA H200 by tuning/h200/tune_packed.py.
"""

from __future__ import annotations

from quire.compute.kernels.triton.linear.packed_gemm import PackedGemmConfig
from quire.compute.kernels.triton.linear.packed_gemm_many import PackedGemmManyConfig
from quire.compute.kernels.triton.linear.packed_gemv import PackedGemvConfig

PackedConfig = PackedGemvConfig | PackedGemmConfig | PackedGemmManyConfig

UP_TO = (1, 8, 16, 32, 64, 128, 256, 512, 4096)
"""Rows of x: a config serves this many and fewer. For more the weight is expanded."""

TABLE: dict[tuple[int, int], tuple[PackedConfig, ...]] = {
    (6144, 4096): (
        PackedGemvConfig(8, 2, 4, 1, 2),
        PackedGemvConfig(8, 2, 4, 1, 2),
        PackedGemvConfig(16, 1, 4, 1),
        PackedGemmManyConfig(32, 1, 2, 4, 2),
        PackedGemmManyConfig(64, 1, 2, 4, 2),
        PackedGemmManyConfig(64, 1, 2, 2, 2),
        PackedGemmManyConfig(128, 2, 2, 1, 2),
        PackedGemmManyConfig(256, 2, 1, 1, 3),
        PackedGemmManyConfig(256, 2, 1, 1, 3),
    ),
    (4096, 4096): (
        PackedGemvConfig(8, 2, 4, 1, 2),
        PackedGemvConfig(8, 2, 4, 1, 2),
        PackedGemvConfig(16, 2, 4, 1),
        PackedGemmManyConfig(32, 1, 2, 8, 2),
        PackedGemmManyConfig(64, 1, 2, 4, 3),
        PackedGemmManyConfig(64, 1, 2, 2, 3),
        PackedGemmManyConfig(128, 1, 2, 1, 3),
        PackedGemmManyConfig(128, 2, 2, 1, 2),
        PackedGemmManyConfig(256, 2, 1, 1, 3),
    ),
    (28672, 4096): (
        PackedGemvConfig(8, 1, 2, 1),
        PackedGemvConfig(8, 1, 2, 1),
        PackedGemvConfig(16, 1, 2, 2, 1, False),
        PackedGemmConfig(32, 1, 4, 1),
        PackedGemmConfig(64, 2, 4, 1),
        PackedGemmManyConfig(128, 2, 2, 1, 3),
        PackedGemmManyConfig(256, 2, 1, 1, 3),
        PackedGemmManyConfig(256, 2, 1, 1, 3),
        PackedGemmManyConfig(256, 2, 1, 1, 3),
    ),
    (4096, 14336): (
        PackedGemvConfig(8, 2, 8, 1),
        PackedGemvConfig(8, 1, 8, 1, 2),
        PackedGemvConfig(16, 1, 8, 2),
        PackedGemmConfig(32, 1, 4, 8),
        PackedGemmManyConfig(64, 1, 2, 4, 3),
        PackedGemmManyConfig(128, 2, 2, 4, 3),
        PackedGemmManyConfig(128, 2, 2, 2, 3),
        PackedGemmManyConfig(256, 2, 1, 2, 3),
        PackedGemmManyConfig(256, 2, 1, 1, 3),
    ),
}
"""(outputs, columns) of the weight → a config for each of UP_TO."""
