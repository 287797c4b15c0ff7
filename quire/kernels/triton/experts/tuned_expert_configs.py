"""How the products of a mixture of experts are cut, by its shape and the number of tokens.

Written by tuning/h200/tune_experts.py on an NVIDIA H200.
"""

from __future__ import annotations

from quire.kernels.triton.linear.rows import Rows
from quire.kernels.triton.linear.tiles import Tiles

CUTS: dict[tuple[int, int, int, int], tuple[tuple[float, tuple[Rows, Rows] | tuple[Tiles, Tiles]], ...]] = {
    (128, 8, 2048, 768): (
        (2, (Rows(4, 2048, 8), Rows(2, 256, 1))),
        (8, (Rows(8, 1024, 8), Rows(8, 256, 2))),
        (128, (Tiles(16, 64, 128, 1, 4, 3, True), Tiles(16, 64, 128, 1, 4, 4, True))),
        (256, (Tiles(32, 128, 64, 1, 4, 4, True), Tiles(32, 128, 64, 1, 4, 5, True))),
        (512, (Tiles(64, 128, 64, 1, 4, 3, True), Tiles(64, 128, 64, 1, 4, 4, False))),
        (2048, (Tiles(128, 256, 64, 1, 8, 4, False), Tiles(128, 256, 64, 1, 8, 4, False))),
        (float("inf"), (Tiles(128, 256, 64, 1, 8, 4, False), Tiles(128, 128, 64, 1, 4, 3, False))),
    ),
    (8, 2, 4096, 14336): (
        (1, (Rows(4, 2048, 8), Rows(2, 256, 1))),
        (32, (Tiles(16, 64, 128, 1, 4, 3, True), Tiles(16, 64, 128, 1, 4, 4, True))),
        (64, (Tiles(32, 128, 64, 1, 4, 4, True), Tiles(32, 128, 64, 1, 4, 5, True))),
        (256, (Tiles(128, 256, 64, 1, 8, 4, False), Tiles(128, 256, 64, 1, 8, 4, False))),
        (512, (Tiles(128, 128, 64, 1, 4, 3, False), Tiles(128, 128, 64, 1, 8, 4, False))),
        (float("inf"), (Tiles(128, 256, 64, 1, 8, 4, False), Tiles(128, 256, 64, 1, 8, 4, False))),
    ),
}
"""(experts, chosen, hidden, width) → up to how many tokens, and the cuts of both products."""

OVERLAP = True
"""Start while the kernel before ends; see dependent_launch."""
