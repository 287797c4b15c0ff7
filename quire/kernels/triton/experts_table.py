"""How the products of a mixture of experts are cut, by its shape and the number of tokens.

Chosen by reasoning, not yet measured.
"""

from __future__ import annotations

from quire.kernels.triton.linear_rows import Rows
from quire.kernels.triton.linear_tiles import Tiles

CUTS: dict[tuple[int, int, int, int], tuple[tuple[float, tuple[Rows, Rows] | tuple[Tiles, Tiles]], ...]] = {
    (128, 8, 2048, 768): (
        (4, (Rows(8, 512, 4), Rows(16, 256, 4))),
        (160, (Tiles(16, 64, 128, 1, 4, 4, True), Tiles(16, 64, 128, 1, 4, 4, True))),
        (768, (Tiles(64, 128, 64, 1, 4, 4, True), Tiles(64, 128, 64, 1, 4, 4, True))),
        (float("inf"), (Tiles(128, 256, 64, 1, 8, 3, False), Tiles(128, 128, 64, 1, 8, 4, False))),
    ),
    (8, 2, 4096, 14336): (
        (4, (Rows(8, 512, 4), Rows(8, 1024, 8))),
        (48, (Tiles(16, 64, 128, 1, 4, 4, True), Tiles(16, 64, 128, 1, 4, 4, True))),
        (256, (Tiles(64, 128, 64, 1, 4, 4, True), Tiles(64, 128, 64, 1, 4, 4, True))),
        (float("inf"), (Tiles(128, 256, 64, 1, 8, 3, False), Tiles(128, 128, 64, 1, 8, 4, False))),
    ),
}
"""(experts, chosen, hidden, width) → up to how many tokens, and the cuts of both products."""

OVERLAP = True
"""Start while the kernel before ends; see dependent_launch."""
