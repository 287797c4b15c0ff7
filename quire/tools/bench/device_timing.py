"""How long a call takes on a device, and the two limits of the device that calls are compared with.

On a GPU the calls are captured in a graph, as in a step, because launching from Python costs more than many calls take.
They cycle through several sets of arguments, so the cache no longer holds what a call reads.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

REPLAYS = 9
_GRAPH_S = 2e-3
"""Seconds of work in a graph: far more than a replay costs."""
_MAX_CALLS = 2_000
_CACHES = 3.0
"""The arguments of all sets together are this many times as large as the last cache."""
_CPU_CACHE = 32 * 2**20
_MAX_SETS = 32


@dataclass(frozen=True)
class Limits:
    """What a device was seen to reach: the bandwidth of a large copy, bytes read and written together, and the
    arithmetic of a large product of two matrices in bfloat16."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, moved: int, flops: int) -> float:
        """The least seconds for this many bytes and operations."""
        return max(moved / self.bytes_per_s, flops / self.flops_per_s)


def measure_limits(device: torch.device) -> Limits:
    """Copy a large tensor and multiply two large matrices of random numbers."""
    on_gpu = device.type == "cuda"
    elements, side = (2**30, 8_192) if on_gpu else (2**24, 1_024)
    source = torch.randn(elements, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copy_s = median_seconds([lambda: target.copy_(source)], device)
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(a)
    product_s = median_seconds([lambda: torch.mm(a, b, out=product)], device)
    return Limits(2 * source.nbytes / copy_s, 2 * side**3 / product_s)


def sets_of_arguments(moved: int, held: int, device: torch.device) -> int:
    """How many sets of arguments a call cycles through that reads and writes `moved` bytes, so that none is in the
    cache. Small ones stay there, as in a step, where the op before has just written them. A set has `held` bytes, since
    a paged cache is larger than what a call reads of it; all sets take at most a quarter of the device's free
    memory."""
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        room = torch.cuda.mem_get_info(device)[0] // 4
    else:
        cache, room = _CPU_CACHE, 2**31
    wanted = math.ceil(_CACHES * cache / max(moved, 1)) + 1
    return max(1, min(wanted, _MAX_SETS, room // max(held, 1)))


def median_seconds(calls: Sequence[Call], device: torch.device, *, graph: bool = True) -> float:
    """Seconds of one call: the median over several runs through `calls`, the same call on different arguments, which
    all run once before. On a GPU, `graph` captures them; a call that waits for the device, as some references do,
    cannot be captured."""
    with torch.inference_mode():
        for call in calls:
            call()
        if device.type != "cuda":
            return _timed_on_cpu(calls)
        with torch.cuda.device(device):
            return _timed_in_graph(calls) if graph else _timed_by_events(calls)


def _timed_on_cpu(calls: Sequence[Call]) -> float:
    seconds = []
    for number in range(max(REPLAYS, len(calls))):
        began = time.perf_counter()
        calls[number % len(calls)]()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _timed_in_graph(calls: Sequence[Call]) -> float:
    graph, rounds = _captured(calls, 1), 1
    graph.replay()
    seconds = _elapsed(graph.replay)
    if seconds < _GRAPH_S:  # a replay begins some microseconds late, which must not count
        rounds = max(1, min(round(_GRAPH_S / seconds), _MAX_CALLS // len(calls)))
        graph = _captured(calls, rounds)
        graph.replay()
    return statistics.median(_elapsed(graph.replay) for _ in range(REPLAYS)) / (rounds * len(calls))


def _captured(calls: Sequence[Call], rounds: int) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph


def _timed_by_events(calls: Sequence[Call]) -> float:
    def once() -> None:
        for call in calls:
            call()

    return statistics.median(_elapsed(once) for _ in range(REPLAYS)) / len(calls)


def _elapsed(run: Call) -> float:
    """Seconds that a run takes on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3
