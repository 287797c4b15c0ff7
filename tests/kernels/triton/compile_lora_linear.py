"""Compiles products of Llama-3.1-8B's layers for sm_90, with A x beside them and alone, on a machine without a card.

    python -m tests.kernels.triton.compile_lora_linear [ROWS]

Prints for each its registers and bytes of shared memory, and those of the product alone. Fails where a kernel spills
registers, where A x leaves room for fewer programs, or where others may start before this kernel's inputs are there.
"""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from quire.compute.kernels.reference.lora import LowRankWeights, Tiles
from quire.compute.kernels.triton import lora_linear
from quire.compute.kernels.triton.linear import linear
from tests.kernels.triton.compile_cases import NoCard
from tests.kernels.triton.not_interpreted import taken

SHAPES = {(6144, 4096): 3, (4096, 4096): 1, (4096, 14336): 1, (28672, 4096): 2}
"""Outputs and columns, and how many modules there are."""
RANK, TILES = 16, 34
REGISTERS, THREADS = 65_536, 128
"""Of a multiprocessor, and of a program."""


def main(rows: int) -> None:
    triton.runtime.driver.set_active(NoCard())
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(  # type: ignore[assignment]
        multi_processor_count=132, shared_memory_per_multiprocessor=228 * 1024
    )
    linear.is_sm_90 = lambda device: True  # type: ignore[assignment]
    for module in (linear, lora_linear):
        module.can_overlap = lambda device: True  # type: ignore[attr-defined]
    lora_linear.multiprocessors = lambda device: 132  # type: ignore[assignment]
    made: list[Any] = []
    JITFunction.__getitem__ = lambda self, grid: (  # type: ignore[method-assign]
        lambda *args, **kwargs: made.append(self.warmup(*args, grid=grid, **kwargs))
    )
    for (outputs, columns), modules in SHAPES.items():
        if linear.tuned_config(outputs, columns, rows, False) is None:
            continue  # cuBLAS
        made.clear()
        x, w = (torch.empty(each, columns, dtype=torch.bfloat16) for each in (rows, outputs))
        a, b = x.new_empty((2, modules * RANK, columns)), x.new_empty((2, outputs, RANK))
        weights = LowRankWeights(a, b, torch.zeros(2, dtype=torch.int64), (outputs // modules,) * modules)
        tiles = Tiles(torch.zeros(TILES, dtype=torch.int64), torch.zeros(TILES, 16, dtype=torch.int64))
        lora_linear.linear_and_shrink(x, w, None, weights, tiles)
        linear.linear(x, w, None)
        beside, alone = made
        assert taken(beside, "STACK") == 0
        assert at_once(beside) >= at_once(alone)
        ptx = re.sub(r"(?m)^\s*//.*", "", beside.asm["ptx"])
        waits, released = ptx.split("griddepcontrol.wait"), "griddepcontrol.launch_dependents"
        assert [released in part for part in waits] == [False, True]
        said = [f"{taken(kernel, 'REG')} registers, {kernel.metadata.shared} bytes" for kernel in (beside, alone)]
        print(f"{rows} × {columns} → {outputs}: {said[0]}; alone {said[1]}")


def at_once(kernel: Any) -> int:
    """Programs on a multiprocessor."""
    return min(REGISTERS // (THREADS * taken(kernel, "REG")), 228 * 1024 // (kernel.metadata.shared + 1024))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 32)
