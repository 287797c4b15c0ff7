"""Which kernel multiplies 8-bit codes with scales fastest, by the shape of the weight and the rows of x.

Measured with fp8 on an NVIDIA H200 by tuning/h200/tune_scaled.py, quantizing x included; those for qkv and down at 32
rows amid a layer, see docs/performance.md.
"""

from __future__ import annotations

from quire.compute.kernels.triton.linear.gemm import GemmConfig
from quire.compute.kernels.triton.linear.gemv import GemvConfig

UP_TO = (1, 16, 32, 64, 128, 256)
"""Rows of x: a config serves this many and fewer. More go to torch's product, or MANY."""

PLAIN: dict[tuple[int, int], tuple[GemvConfig | GemmConfig | None, ...]] = {
    (6144, 4096): (
        GemvConfig(4, 2048, 8),
        GemmConfig(16, 64, 256, 2, 4, 5, True),
        GemmConfig(32, 64, 256, 2, 4, 5, True),
        GemmConfig(64, 64, 128, 2, 4, 6, True),
        GemmConfig(64, 64, 128, 1, 4, 6, True),
        None,
    ),
    (4096, 4096): (
        GemvConfig(8, 512, 4),
        GemmConfig(16, 64, 256, 3, 4, 4, True),
        GemmConfig(32, 64, 256, 3, 4, 4, True),
        GemmConfig(64, 64, 256, 2, 4, 4, True),
        GemmConfig(64, 64, 256, 1, 4, 4, True),
        GemmConfig(128, 64, 128, 1, 4, 5, True),
    ),
    (4096, 14336): (
        GemvConfig(4, 512, 2),
        GemmConfig(16, 64, 256, 4, 4, 4, True),
        GemmConfig(32, 64, 256, 2, 4, 5, True),
        GemmConfig(64, 64, 256, 2, 4, 4, True),
        GemmConfig(64, 64, 128, 2, 4, 6, True),
        None,
    ),
    (28672, 4096): (
        GemvConfig(4, 1024, 4),
        GemmConfig(16, 64, 256, 1, 4, 4, True),
        GemmConfig(32, 128, 128, 1, 8, 5, True),
        GemmConfig(64, 128, 128, 1, 8, 4, True),
        None,
        None,
    ),
    (5120, 2048): (
        GemvConfig(4, 512, 2),
        GemmConfig(16, 64, 256, 1, 4, 4, True),
        GemmConfig(32, 64, 256, 1, 4, 4, True),
        GemmConfig(64, 64, 256, 1, 4, 4, True),
        GemmConfig(64, 64, 128, 1, 4, 6, True),
        None,
    ),
    (2048, 4096): (
        GemvConfig(2, 1024, 2),
        GemmConfig(16, 64, 256, 4, 4, 4, True),
        GemmConfig(32, 64, 128, 4, 4, 8, True),
        GemmConfig(64, 64, 128, 3, 4, 6, True),
        GemmConfig(64, 64, 128, 2, 4, 6, True),
        GemmConfig(128, 64, 128, 2, 4, 5, True),
    ),
}
"""(outputs, columns) of the weight → a config for each of UP_TO; None: torch's product, or MANY."""

GATED: dict[tuple[int, int], tuple[GemvConfig | GemmConfig | None, ...]] = {
    (28672, 4096): (
        GemvConfig(4, 512, 2),
        GemmConfig(16, 128, 128, 1, 8, 5, True),
        GemmConfig(32, 128, 128, 1, 8, 5, True),
        GemmConfig(64, 128, 128, 1, 8, 4, True),
        None,
        None,
    ),
}
"""(outputs, columns) of a gated weight → a config for each of UP_TO.

None: the kernel of gated.py, torch's product and a kernel for the gate, or MANY.
"""

INT8_ROW: dict[tuple[int, int], GemvConfig] = {
    (6144, 4096): GemvConfig(8, 1024, 4),
    (4096, 4096): GemvConfig(4, 2048, 4),
    (4096, 14336): GemvConfig(1, 4096, 4),
    (28672, 4096): GemvConfig(8, 1024, 4),
}
"""(outputs, columns) of the weight → the config for one row of int8 codes; see int8_gemv.py."""

INT8_GATED_ROW = GemvConfig(8, 1024, 4)
"""The config for one row of int8 codes where a gate is applied."""

MANY = GemmConfig(128, 128, 128, 1, 8, 5, True)
"""The config for products of many rows that torch's product does not take."""
