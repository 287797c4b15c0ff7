"""Which kernel multiplies few rows fastest, by the shape of the weight. Written by benchmarks/h200/tune_linear.py.

Chosen by reasoning, not yet measured.
"""

from __future__ import annotations

from quire.kernels.triton.linear_rows import Rows
from quire.kernels.triton.linear_tiles import Tiles

UP_TO = (1, 16, 32, 64)
"""Rows of x: a cut serves this many and fewer. More than the last go to cuBLAS."""

PLAIN: dict[tuple[int, int], tuple[Rows | Tiles | None, ...]] = {
    (6144, 4096): (
        Rows(2, 1024, 4),
        Tiles(16, 64, 128, 4, 4, 4, True),
        Tiles(32, 64, 128, 4, 4, 4, True),
        Tiles(64, 128, 64, 4, 4, 4, True),
    ),
    (4096, 4096): (
        Rows(2, 1024, 4),
        Tiles(16, 64, 128, 4, 4, 4, True),
        Tiles(32, 64, 128, 4, 4, 4, True),
        Tiles(64, 128, 64, 8, 4, 4, True),
    ),
    (28672, 4096): (
        Rows(4, 1024, 4),
        Tiles(16, 64, 128, 2, 4, 4, True),
        Tiles(32, 64, 128, 2, 4, 4, True),
        Tiles(64, 128, 64, 2, 4, 4, True),
    ),
    (4096, 14336): (
        Rows(2, 2048, 8),
        Tiles(16, 64, 128, 6, 4, 4, True),
        Tiles(32, 64, 128, 6, 4, 4, True),
        Tiles(64, 128, 64, 8, 4, 4, True),
    ),
    (128256, 4096): (
        Rows(4, 1024, 4),
        Tiles(16, 64, 128, 1, 4, 4, True),
        Tiles(32, 64, 128, 1, 4, 4, True),
        Tiles(64, 128, 64, 1, 4, 4, True),
    ),
}
"""(outputs, columns) of the weight → a cut for each of UP_TO; None is cuBLAS."""

GATED: dict[tuple[int, int], tuple[Rows | Tiles | None, ...]] = {
    (28672, 4096): (
        Rows(4, 1024, 4),
        Tiles(16, 64, 128, 2, 4, 4, True),
        Tiles(32, 64, 128, 2, 4, 4, True),
        Tiles(64, 128, 64, 2, 4, 4, True),
    ),
}
"""The same where a gate is applied; None is cuBLAS and a kernel for the gate."""

OVERLAP = True
"""Start while the kernel before ends; see dependent_launch."""
