"""Compiles products of Llama-3.1-8B's layers for sm_90, with A x beside them, with all updates of gates and ups, and
alone, on a machine without a card.

    python -m tests.kernels.triton.compile_lora_linear [ROWS]

Prints for each its registers and bytes of shared memory, and those of the product alone. Fails where a kernel spills
registers, where A x or updates leave room for fewer programs, or where others may start before this kernel's inputs
are there.
"""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from quire.kernels.reference.lora import LowRankWeights, Scaling, Tiles
from quire.kernels.triton import lora_gated, lora_linear
from quire.kernels.triton.linear import linear
from tests.kernels.triton.compile_cases import NoCard
from tests.kernels.triton.not_interpreted import taken

SHAPES = {(6144, 4096): 3, (4096, 4096): 1, (4096, 14336): 1, (28672, 4096): 2}
"""Outputs and columns, and how many modules there are."""
RANK, TILES, ADAPTERS = 16, 34, 32
REGISTERS, THREADS = 65_536, 128
"""Of a multiprocessor, and of a program."""


def main(rows: int) -> None:
    triton.runtime.driver.set_active(NoCard())
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(  # type: ignore[assignment]
        multi_processor_count=132, shared_memory_per_multiprocessor=228 * 1024
    )
    linear.is_sm_90 = lambda device: True  # type: ignore[assignment]
    for module in (linear, lora_linear, lora_gated):
        module.can_overlap = lambda device: True  # type: ignore[attr-defined]
    for module in (lora_linear, lora_gated):
        module.multiprocessors = lambda device: 132  # type: ignore[attr-defined]
    made: list[Any] = []
    JITFunction.__getitem__ = lambda self, grid: (  # type: ignore[method-assign]
        lambda *args, **kwargs: made.append(self.warmup(*args, grid=grid, **kwargs))
    )
    for (outputs, columns), modules in SHAPES.items():
        if linear.tuned_config(outputs, columns, rows, False) is None:
            continue  # cuBLAS
        made.clear()
        x, w = (torch.empty(each, columns, dtype=torch.bfloat16) for each in (rows, outputs))
        memory = x.new_empty((ADAPTERS, modules * RANK * columns + outputs * (RANK + 2)))
        a, b, factors, summands = memory.split((modules * RANK * columns, outputs * RANK, outputs, outputs), dim=1)
        ranks, each = torch.zeros(ADAPTERS, dtype=torch.int64), (outputs // modules,) * modules
        a, b = a.view(ADAPTERS, modules * RANK, columns), b.view(ADAPTERS, outputs, RANK)
        weights = LowRankWeights(a, b, ranks, each, Scaling(factors, summands, ranks))
        tiles = Tiles(*(torch.zeros(shape, dtype=torch.int64) for shape in ((TILES,), (TILES, 16), (rows,))))
        lora_linear.linear_and_shrink(x, w, None, weights, tiles)
        linear.linear(x, w, None)
        beside, alone = made
        compare(f"{rows} × {columns} → {outputs}", beside, alone)
        if modules == 2:
            made.clear()
            out = x.new_empty((rows, outputs // 2))
            lora_gated.updated_linear_silu_and_mul(x, w, None, weights, tiles, out)
            compare(f"{rows} × {columns} → {outputs // 2} with a gate", made[0], alone)


def compare(name: str, updated: Any, alone: Any) -> None:
    assert taken(updated, "STACK") == 0
    assert at_once(updated) >= at_once(alone)
    ptx = re.sub(r"(?m)^\s*//.*", "", updated.asm["ptx"])
    waits, released = ptx.split("griddepcontrol.wait"), "griddepcontrol.launch_dependents"
    assert [released in part for part in waits] == [False, True, True]
    said = [f"{taken(kernel, 'REG')} registers, {kernel.metadata.shared} bytes" for kernel in (updated, alone)]
    print(f"{name}: {said[0]}; alone {said[1]}")


def at_once(kernel: Any) -> int:
    """Programs on a multiprocessor."""
    return min(REGISTERS // (THREADS * taken(kernel, "REG")), 228 * 1024 // (kernel.metadata.shared + 1024))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 32)
