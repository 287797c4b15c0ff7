"""CUDA graphs of a model's decode steps: one for each of a few numbers of rows, and padding up to these.

A graph replays the same kernels on the same addresses, so everything it reads is in persistent buffers, and what varies
from step to step (slots, lengths, tables) is read by its kernels from the device. Knows nothing about sampling.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def graph_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that are recorded: close together where rows are cheap to pad but weights are read anyway."""
    sizes = [1, 2, 4, *range(8, 33, 8), *range(48, 129, 16), *range(160, 257, 32), *range(320, max_rows + 64, 64)]
    return sorted({min(size, max_rows) for size in sizes})


class DecodeGraphs:
    """Graphs by number of rows.

    Args:
        sizes: Numbers of rows, ascending.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, Tensor] = {}

    def fit(self, rows: int) -> bool:
        """Whether there is a graph for so many rows."""
        return bool(self._sizes) and rows <= self._sizes[-1]

    def padded(self, rows: int) -> int:
        """The number of rows of the smallest graph that holds so many."""
        return self._sizes[bisect_left(self._sizes, rows)]

    def record(self, rows: int, forward: Callable[[], Tensor]) -> None:
        """Record what `forward` launches. It must have run before, so that no kernel is compiled meanwhile.

        All graphs share their memory, also that of their logits: no two replays are under way at a time. The largest
        should be recorded first.
        """
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = forward()
        self._graphs[rows], self._logits[rows] = graph, _not_held(logits)

    def replay(self, rows: int) -> Tensor:
        """[rows, vocab] logits, valid until the next replay."""
        self._graphs[rows].replay()
        return self._logits[rows]


class _Memory:
    """Memory of somebody else's, as numpy and its kin describe it to each other."""

    def __init__(self, x: Tensor) -> None:
        kind = {2: "<i2", 4: "<i4"}[x.element_size()]
        self.__cuda_array_interface__ = {
            "data": (x.data_ptr(), False), "shape": tuple(x.shape), "typestr": kind, "strides": None, "version": 3,
        }  # fmt: skip


def _not_held(x: Tensor) -> Tensor:
    """x's memory as a tensor that does not keep it from being given to others; x is contiguous."""
    assert x.is_contiguous()
    return torch.as_tensor(_Memory(x), device=x.device).view(x.dtype)
