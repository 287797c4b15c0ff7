"""Which kernel multiplies 8-bit codes with scales fastest, by the shape of the weight and the rows of x.

Guessed from tuned_linear_configs.py: a weight has half of its bytes there.
"""

from __future__ import annotations

from quire.kernels.triton.linear.gemm import GemmConfig
from quire.kernels.triton.linear.gemv import GemvConfig

UP_TO = (1, 16, 32, 64, 128)
"""Rows of x: a config serves this many and fewer."""

PLAIN: dict[tuple[int, int], tuple[GemvConfig | GemmConfig, ...]] = {
    (6144, 4096): (
        GemvConfig(2, 2048, 4),
        GemmConfig(16, 64, 128, 2, 4, 6, True),
        GemmConfig(32, 64, 128, 2, 4, 6, True),
        GemmConfig(64, 64, 128, 2, 4, 5, True),
        GemmConfig(64, 64, 128, 2, 4, 5, True),
    ),
    (4096, 4096): (
        GemvConfig(2, 2048, 4),
        GemmConfig(16, 64, 128, 2, 4, 6, True),
        GemmConfig(32, 64, 128, 2, 4, 6, True),
        GemmConfig(64, 64, 128, 2, 4, 5, True),
        GemmConfig(64, 64, 128, 2, 4, 5, True),
    ),
    (4096, 14336): (
        GemvConfig(2, 2048, 4),
        GemmConfig(16, 64, 128, 2, 4, 6, True),
        GemmConfig(32, 64, 128, 2, 4, 6, True),
        GemmConfig(64, 64, 128, 2, 4, 5, True),
        GemmConfig(64, 64, 128, 2, 4, 5, True),
    ),
    (28672, 4096): (
        GemvConfig(2, 2048, 4),
        GemmConfig(16, 64, 128, 1, 4, 6, True),
        GemmConfig(32, 64, 128, 1, 4, 6, True),
        GemmConfig(64, 64, 128, 1, 4, 5, True),
        GemmConfig(64, 64, 128, 1, 4, 5, True),
    ),
    (128256, 4096): (
        GemvConfig(2, 2048, 4),
        GemmConfig(16, 64, 128, 1, 4, 6, True),
        GemmConfig(32, 64, 128, 1, 4, 6, True),
        GemmConfig(64, 64, 128, 1, 4, 5, True),
        GemmConfig(64, 64, 128, 1, 4, 5, True),
    ),
}
"""(outputs, columns) of the weight → a config for each of UP_TO."""

GATED: dict[tuple[int, int], tuple[GemvConfig | GemmConfig, ...]] = {
    (28672, 4096): (
        GemvConfig(2, 2048, 4),
        GemmConfig(16, 64, 128, 1, 4, 6, True),
        GemmConfig(32, 64, 128, 1, 4, 6, True),
        GemmConfig(64, 64, 128, 1, 4, 5, True),
        GemmConfig(64, 64, 128, 1, 4, 5, True),
    ),
}
"""The same where a gate is applied."""

MANY = GemmConfig(128, 128, 128, 1, 8, 3, False)
"""For more rows, where torch's product does not serve."""

LIBRARY_ROWS = 129
"""Rows from which on torch's product of fp8 codes serves."""
