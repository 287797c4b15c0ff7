"""Compiles the gated product of many rows for sm_90, on a machine without a card.

    python -m tests.kernels.triton.linear.compile_gated

Prints a line for each dtype, with how many of its kernels Triton made for products of all shapes; fails where one does
not compile, spills registers or leaves the matrix units and the copy engine to others.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from quire.compute.kernels.triton.linear.gated import _gated_gemm_kernel, gated_gemm, supports_gated_gemm
from tests.kernels.triton.compile_cases import NoCard
from tests.kernels.triton.not_interpreted import taken

SHAPES = ((1, 16, 16), (128, 3072, 1024), (1000, 1000, 520), (1024, 14336, 4096), (8192, 28672, 8192))
"""GemvConfig, outputs, columns."""


def main() -> None:
    triton.runtime.driver.set_active(NoCard())
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)  # type: ignore
    made: list[Any] = []
    JITFunction.__getitem__ = lambda self, grid: (  # type: ignore[method-assign]
        lambda *args, **kwargs: made.append(self.warmup(*args, grid=grid, **kwargs))
    )
    for dtype in (torch.bfloat16, torch.float16):
        made.clear()
        for rows, outputs, columns in SHAPES:
            with torch.device("meta"):
                x, w = torch.empty(rows, columns, dtype=dtype), torch.empty(2 * outputs, columns, dtype=dtype)
                y = torch.empty(rows, outputs, dtype=dtype)
            assert supports_gated_gemm(x, w, y)
            gated_gemm(x, w, y, overlap=True)
        assert "wgmma.mma_async" in made[0].asm["ptx"]
        assert "cp.async.bulk.tensor" in made[0].asm["ptx"]
        assert taken(made[0], "STACK") == 0
        print(dtype, len({id(kernel) for kernel in made}))
    assert len(_gated_gemm_kernel.function.device_caches[0][0]) == 2


if __name__ == "__main__":
    main()
