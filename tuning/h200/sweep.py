"""What the sweeps share: compiling candidates in parallel, timing calls in a CUDA graph, choosing few of many."""

from __future__ import annotations

import multiprocessing
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

Job = TypeVar("Job")
Product = TypeVar("Product", bound=Hashable)
Kernels = TypeVar("Kernels", bound=Hashable)

GRAPH_S = 3e-4
"""Seconds of work in a graph."""
REPLAYS = 5
CACHES_BYTES = 256 * 2**20
"""Weights of one measurement together: several times the GPU's cache."""


def compile_all(run: Callable[[Job], None], jobs: Sequence[Job], processes: int) -> dict[Job, str]:
    """Call `run` on every job in processes of their own, which leaves the compiled kernels in Triton's cache.

    To be called before this process uses the GPU, because the processes are forked.

    Returns:
        The jobs that failed, with what they said.
    """
    assert not torch.cuda.is_initialized()
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        said = pool.map(_Attempt(run), jobs, chunksize=1)
    return {job: text for job, text in zip(jobs, said, strict=True) if text}


class _Attempt:
    """A job's failure as text. A failed launch may leave the GPU unusable for the process, so only text is kept."""

    def __init__(self, run: Callable[[Job], None]) -> None:
        self._run = run

    def __call__(self, job: Job) -> str:
        try:
            self._run(job)
            torch.cuda.synchronize()
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""


def graph_seconds(calls: Sequence[Callable[[], object]], guess: float) -> float:
    """Median seconds of a call, where all calls follow each other in a graph.

    Args:
        calls: The same call on different weights; they have been run before.
        guess: About how long one takes.
    """
    rounds = max(1, round(GRAPH_S / (guess * len(calls))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS)] for _ in range(2))
    for begin, end in zip(begins, ends, strict=True):
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    milliseconds = statistics.median(begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True))
    return milliseconds / 1e3 / (rounds * len(calls))


def few_enough(good: Mapping[Product, Iterable[Kernels]], free: Iterable[Kernels] = ()) -> set[Kernels]:
    """A small set with a good choice for every product, built greedily: add what serves most of the products left.

    Args:
        good: The good choices of each product.
        free: Choices that cost nothing to have.
    """
    kept = set(free)
    left = {product: set(kernels) for product, kernels in good.items()}
    while left := {product: kernels for product, kernels in left.items() if not kernels & kept}:
        kept.add(Counter(each for kernels in left.values() for each in kernels).most_common(1)[0][0])
    return kept


def copies(one_bytes: int) -> int:
    """How many tensors of this many bytes are larger than the GPU's cache together."""
    return max(1, -(-CACHES_BYTES // one_bytes))
