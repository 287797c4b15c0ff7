"""Compiles attention of rows of several tokens for a card, on a machine without one, and says what its programs take.

    python -m tests.kernels.triton.attention.fits [CAPABILITY:WIDTH:DTYPE …]

Prints a line for each kernel, and fails where a multiprocessor does not take as many of its programs as it should.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from quire.compute.kernels.reference.attention_inputs import KVSplits, Mask, PagedKV, PagedRows, QueryTiles, Scores
from quire.compute.kernels.reference.paged_attention import new_prefill_partials
from quire.compute.kernels.triton.attention import prefill, prefill_split_kv
from tests.kernels.triton.compile_cases import NoCard
from tests.kernels.triton.not_interpreted import taken

MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a program may have, by compute capability; …"""
KEPT = 1024
"""… a multiprocessor has so many more, and keeps as many for itself for each program."""
REGISTERS = 65536
"""Of a multiprocessor."""
HEADS, KV_HEADS = 8, 2
EVERY = [f"{card}:{d}:{dtype}" for card in MEMORY for d in (64, 128, 256, 512) for dtype in ("bfloat16", "float32")]


def main(cases: list[str]) -> int:
    """The exit code."""
    made: list[Any] = []
    JITFunction.__getitem__ = lambda self, grid: (  # type: ignore[method-assign]
        lambda *args, **kwargs: made.append((self.fn.__name__, self.warmup(*args, grid=grid, **kwargs)))
    )
    failed = False
    for case in cases:
        made.clear()
        capability, d, dtype = case.split(":")
        card, width, element = int(capability), int(d), getattr(torch, dtype)
        triton.runtime.driver.set_active(_Card(card))
        for module in (prefill, prefill_split_kv):
            module.can_overlap = partial(_overlaps, card)  # type: ignore[assignment]
        prefill.program_memory = partial(_memory, card)  # type: ignore[assignment]
        with torch.device("meta"):
            _launch(width, element)
        at_once = prefill.shape_within(MEMORY[card], width, element.itemsize).at_once
        for name, kernel in made:
            programs, memory, registers = (
                at_once if name == "_prefill_attention_split_kv" else 1,
                kernel.metadata.shared,
                taken(kernel, "REG") * 32 * kernel.metadata.num_warps,
            )
            fits = programs * (memory + KEPT) <= MEMORY[card] + KEPT and programs * registers <= REGISTERS
            failed |= not fits
            print(case, name, f"{programs} x {memory} bytes, {registers} registers", "" if fits else "DO NOT FIT")
    return failed


class _Card(NoCard):
    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        """Another one for each, since what was compiled is remembered by device."""
        return self._capability


def _memory(capability: int, device: torch.device) -> int:
    return MEMORY[capability]


def _overlaps(capability: int, device: torch.device) -> bool:
    return capability >= 90


def _launch(d: int, dtype: torch.dtype) -> None:
    """Whole tiles, and prefill_split_kv."""
    q, cache = torch.empty(9, HEADS, d, dtype=dtype), torch.empty(9, 16, KV_HEADS, d, dtype=dtype)
    table = torch.empty(9, 9, dtype=torch.int64)
    step, tiles = PagedRows(table, *_columns(3)), QueryTiles(*_columns(3))
    queries = prefill.queries_of_tile(d, q.element_size(), HEADS // KV_HEADS, q.device)
    partials = new_prefill_partials(9 * queries, HEADS, d, q.device)
    kv, splits, rest = PagedKV(cache, cache), KVSplits(*_columns(2)), (Mask(), Scores(1.0), q)
    prefill.prefill_attention(q, kv, step, tiles, queries, *rest)
    prefill_split_kv.prefill_attention_split_kv(q, kv, step, tiles, splits, queries, partials, *rest)


def _columns(number: int) -> Iterator[torch.Tensor]:
    return (torch.empty(9, dtype=torch.int64) for _ in range(number))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or EVERY))
