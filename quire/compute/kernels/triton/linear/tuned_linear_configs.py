"""Which kernel multiplies few rows fastest, by the shape of the weight.

Written on an NVIDIA H200 by tuning/h200/tune_linear.py, which times each product by itself; for 2 to 64 rows of
Llama-3.1-8B's and Qwen3-0.6B's layers, by tune_layers.py beside it, which times all that a layer launches.
"""

from __future__ import annotations

from quire.compute.kernels.triton.linear.gemm import GemmConfig
from quire.compute.kernels.triton.linear.gemv import GemvConfig

UP_TO = (1, 2, 4, 8, 16, 32, 64, 128)
"""Rows of x: a config serves this many and fewer. More than the last go to cuBLAS."""

PLAIN: dict[tuple[int, int], tuple[GemvConfig | GemmConfig | None, ...]] = {
    (6144, 4096): (
        GemvConfig(2, 1024, 4),
        GemmConfig(16, 64, 128, 1, 4, 6, True),
        GemmConfig(16, 64, 128, 1, 4, 6, True),
        GemmConfig(16, 64, 128, 1, 4, 6, True),
        GemmConfig(16, 64, 128, 1, 4, 6, True),
        GemmConfig(32, 64, 128, 1, 4, 6, True),
        GemmConfig(64, 64, 128, 1, 4, 5, True),
        None,
    ),
    (4096, 4096): (
        GemvConfig(2, 1024, 4),
        GemmConfig(16, 64, 128, 1, 4, 6, True),
        GemmConfig(16, 64, 128, 1, 4, 6, True),
        GemmConfig(16, 64, 128, 1, 4, 6, True),
        GemmConfig(16, 64, 128, 2, 4, 6, True),
        GemmConfig(32, 64, 128, 1, 4, 6, True),
        None,
        None,
    ),
    (4096, 14336): (
        GemvConfig(2, 2048, 4),
        GemmConfig(16, 64, 128, 2, 4, 6, True),
        GemmConfig(16, 64, 128, 2, 4, 6, True),
        GemmConfig(16, 64, 128, 2, 4, 6, True),
        GemmConfig(16, 64, 128, 2, 4, 6, True),
        GemmConfig(32, 64, 128, 2, 4, 5, True),
        GemmConfig(64, 64, 128, 2, 4, 5, True),
        None,
    ),
    (28672, 4096): (
        GemvConfig(2, 1024, 4),
        GemmConfig(16, 64, 128, 1, 4, 4, True),
        GemmConfig(16, 64, 128, 1, 4, 4, True),
        GemmConfig(16, 64, 128, 1, 4, 4, True),
        GemmConfig(16, 64, 128, 1, 4, 4, True),
        GemmConfig(32, 64, 128, 1, 4, 4, True),
        GemmConfig(64, 64, 64, 1, 4, 6, True),
        None,
    ),
    (128256, 4096): (
        GemvConfig(2, 1024, 4),
        GemmConfig(16, 64, 128, 1, 4, 4, True),
        None,
        GemmConfig(16, 64, 128, 1, 4, 4, True),
        GemmConfig(16, 64, 128, 1, 4, 4, True),
        GemmConfig(32, 64, 128, 1, 4, 4, True),
        GemmConfig(64, 128, 64, 1, 4, 4, True),
        None,
    ),
    (4096, 1024): (
        GemvConfig(4, 1024, 4),
        GemmConfig(16, 64, 128, 2, 4, 6, True),
        GemmConfig(16, 64, 128, 2, 4, 6, True),
        GemmConfig(16, 64, 128, 2, 4, 6, True),
        GemmConfig(16, 64, 128, 2, 4, 6, True),
        GemmConfig(32, 64, 128, 1, 4, 6, True),
        None,
        None,
    ),
    (1024, 2048): (
        GemvConfig(2, 2048, 4),
        GemmConfig(16, 64, 128, 4, 4, 6, True),
        GemmConfig(16, 64, 128, 4, 4, 6, True),
        GemmConfig(16, 64, 128, 4, 4, 6, True),
        GemmConfig(16, 64, 128, 4, 4, 6, True),
        GemmConfig(32, 64, 128, 4, 4, 5, True),
        GemmConfig(64, 64, 128, 4, 4, 5, True),
        None,
    ),
    (1024, 3072): (
        GemvConfig(2, 2048, 8),
        GemmConfig(16, 64, 128, 6, 4, 6, True),
        GemmConfig(16, 64, 128, 6, 4, 6, True),
        GemmConfig(16, 64, 128, 6, 4, 6, True),
        GemmConfig(16, 64, 128, 6, 4, 6, True),
        GemmConfig(32, 64, 128, 6, 4, 5, True),
        GemmConfig(64, 64, 128, 4, 4, 5, True),
        None,
    ),
    (151936, 1024): (
        GemvConfig(8, 256, 4),
        GemmConfig(16, 64, 128, 1, 4, 4, True),
        GemmConfig(16, 64, 128, 1, 4, 4, True),
        GemmConfig(16, 64, 128, 1, 4, 4, True),
        GemmConfig(16, 64, 128, 1, 4, 4, True),
        GemmConfig(32, 64, 128, 1, 4, 4, True),
        GemmConfig(64, 64, 64, 1, 4, 6, True),
        None,
    ),
    (6144, 1024): (
        GemvConfig(4, 1024, 4),
        None,
        None,
        None,
        GemmConfig(16, 32, 256, 1, 4, 4, False),
        None,
        None,
        None,
    ),
    (5120, 2048): (
        GemvConfig(4, 1024, 4),
        GemmConfig(16, 64, 128, 3, 4, 4, True),
        GemmConfig(16, 64, 128, 3, 4, 4, True),
        GemmConfig(16, 64, 128, 3, 4, 4, True),
        GemmConfig(16, 64, 128, 3, 4, 4, True),
        None,
        None,
        None,
    ),
    (2048, 4096): (
        GemvConfig(2, 1024, 4),
        GemmConfig(16, 64, 128, 4, 4, 6, True),
        GemmConfig(16, 64, 128, 4, 4, 6, True),
        GemmConfig(16, 64, 128, 4, 4, 6, True),
        GemmConfig(16, 64, 128, 4, 4, 6, True),
        GemmConfig(32, 64, 128, 4, 4, 4, True),
        GemmConfig(64, 64, 128, 4, 4, 4, True),
        None,
    ),
    (128, 2048): (
        GemvConfig(4, 2048, 8),
        GemmConfig(8, 64, 128, 8, 4, 4, True),
        GemmConfig(8, 64, 128, 8, 4, 4, True),
        GemmConfig(8, 64, 128, 8, 4, 4, True),
        GemmConfig(16, 64, 128, 8, 4, 3, True),
        GemmConfig(32, 64, 128, 8, 4, 4, True),
        None,
        None,
    ),
    (151936, 2048): (
        GemvConfig(4, 1024, 4),
        GemmConfig(16, 64, 128, 1, 4, 4, True),
        GemmConfig(16, 64, 128, 1, 4, 4, True),
        GemmConfig(16, 64, 128, 1, 4, 4, True),
        GemmConfig(16, 64, 128, 1, 4, 4, True),
        GemmConfig(32, 64, 128, 1, 4, 4, True),
        None,
        None,
    ),
}
"""(outputs, columns) of the weight → a config for each of UP_TO; None is cuBLAS."""

GATED: dict[tuple[int, int], tuple[GemvConfig | GemmConfig | None, ...]] = {
    (28672, 4096): (
        GemvConfig(4, 2048, 8),
        GemmConfig(16, 64, 128, 1, 4, 4, True),
        GemmConfig(16, 64, 128, 1, 4, 4, True),
        GemmConfig(16, 64, 128, 1, 4, 4, True),
        GemmConfig(16, 64, 128, 1, 4, 4, True),
        GemmConfig(32, 128, 128, 1, 8, 4, True),
        GemmConfig(64, 128, 64, 1, 4, 6, True),
        GemmConfig(128, 256, 64, 1, 8, 4, False),
    ),
    (6144, 1024): (
        GemvConfig(4, 512, 2),
        GemmConfig(16, 64, 128, 1, 4, 6, True),
        GemmConfig(16, 64, 128, 1, 4, 6, True),
        GemmConfig(16, 64, 128, 1, 4, 6, True),
        GemmConfig(16, 64, 128, 1, 4, 6, True),
        GemmConfig(32, 64, 128, 1, 4, 6, True),
        GemmConfig(64, 64, 128, 1, 4, 5, True),
        None,
    ),
}
"""(outputs, columns) of a gated weight → a config for each of UP_TO; None: the plain product, then a gate kernel."""

OVERLAP = True
"""Whether these kernels start while the previous one ends; see dependent_launch."""
