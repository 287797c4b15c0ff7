"""Compiles products of many rows for sm_90, on a machine without a card.

    python -m tests.kernels.triton.linear.compile_wide

Prints a line for each kind of kernel; fails where one does not compile or leaves the matrix units to others.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from quire.kernels.triton.linear import wide
from quire.kernels.triton.linear.wide import Wide, wide_linear
from tests.kernels.triton.compile_cases import NoCard

KINDS = (
    (Wide(2, 256, 4, swapped=False, streamed=True), True, True),
    (Wide(2, 128, 6, swapped=True, streamed=True), False, True),
    (Wide(3, 256, 3, swapped=True, streamed=False), True, False),
    (Wide(3, 128, 4, swapped=False, streamed=False), False, True),
)
"""A cut, whether the product is gated, whether it has a bias."""


class Compiled:
    """A kernel that is compiled when it is launched, and kept."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.last: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.last = self._function.warmup(*args, grid=grid, **kwargs)

        return launch


def main() -> None:
    triton.runtime.driver.set_active(NoCard())
    wide._wide_kernel = kernel = Compiled(wide._wide_kernel)
    for cut, gate, biased in KINDS:
        x, w = (torch.empty(rows, 8192, dtype=torch.bfloat16) for rows in (256, 1024))
        y = torch.empty(256, 512 if gate else 1024, dtype=torch.bfloat16)
        wide_linear(x, w, w[0, :1024] if biased else None, y, cut, gate, overlap=True)
        assert "wgmma.mma_async" in kernel.last.asm["ptx"]
        assert "cp.async.bulk.tensor" in kernel.last.asm["ptx"]
        print(cut)


if __name__ == "__main__":
    main()
