"""`quire bench kernels`: every op of the kernel table on its own, beside the least time its bytes and operations need.

The cases are those of `quire.tools.bench.kernel_cases`. On a GPU all of them run; elsewhere the small ones, which show
that an op works but say nothing about speed. Calls on a GPU are captured in a graph, as in a step, because launching
them from Python costs more than many of them take. They cycle through several sets of arguments, so the cache no longer
holds what a call reads.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from quire.compute.kernels import reference
from quire.compute.kernels.dispatch import KERNELS, kernel
from quire.errors import ConfigError
from quire.tools.bench import kernel_cases
from quire.tools.bench.kernel_cases import Arguments, KernelCase
from quire.tools.bench.report import measured_with, write_json

Call = Callable[[], object]

REPLAYS = 9
_GRAPH_S = 2e-3
"""Seconds of work in a graph: far more than a replay costs."""
_MAX_CALLS = 2_000
_CACHES = 3.0
"""The arguments of all sets together are this many times as large as the last cache."""
_CPU_CACHE = 32 * 2**20
_MAX_SETS = 32
_NOT_TIMED = ("pack_",)
"""Ops that run once at the start have no cases."""
_HEADINGS = ("µs", "MB", "GB/s", "TFLOP/s", "of limit")


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
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3


@dataclass(frozen=True)
class KernelsOptions:
    """Which kernels, and where the result goes."""

    DESCRIPTION: ClassVar[str] = "Measure each kernel on its own, against what the device reaches."

    op: tuple[str, ...] = ()
    """Only these ops; default: all that have cases."""
    reference: bool = False
    """Time the torch reference on the same device and arguments as well."""
    json: str | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class Measured:
    """The result of a case: the median time of one call, and its `share` of the limit, the least time for the case's
    bytes and operations by `seconds`. The reference's time is None if not asked for, or if it does not take these
    arguments."""

    op: str
    name: str
    seconds: float
    bytes: int
    bytes_per_s: float
    flops: int
    flops_per_s: float
    share: float
    reference_seconds: float | None = None


def run(options: KernelsOptions) -> int:
    """Measure and report; returns the exit code. Raises ConfigError for an op without cases."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = _chosen(options.op, device)
    began = time.perf_counter()
    limits = measure_limits(device)
    print(_limits_line(limits, device))
    op, name = (2 + max(len(getattr(case, field)) for case in cases) for field in ("op", "name"))
    row = f"{{:<{op}}}{{:<{name}}}{{:>10}}{{:>10}}{{:>9}}{{:>9}}{{:>10}}{{:>14}}".format
    print(row("op", "case", *_HEADINGS, "reference µs" if options.reference else "").rstrip(), flush=True)
    results = []
    for case in cases:
        results.append(measure(case, limits, device, with_reference=options.reference))
        print(row(*_cells(results[-1])).rstrip(), flush=True)
    print(f"{len(results)} cases in {time.perf_counter() - began:.1f} s")
    if not options.op and (uncovered := ops_without_cases(device.type)):
        print(f"No cases: {', '.join(uncovered)}")
    if options.json is not None:
        result = measured_with(options) | {"limits": asdict(limits), "cases": [asdict(result) for result in results]}
        write_json(options.json, result)
    return 0


def all_cases(device: torch.device) -> list[KernelCase]:
    """The cases of all families, by the families' names: the small ones unless the device is a GPU."""
    names = sorted(module.name for module in pkgutil.iter_modules(kernel_cases.__path__))
    modules = [importlib.import_module(f"{kernel_cases.__name__}.{name}") for name in names]
    sizes = "CASES" if device.type == "cuda" else "SMALL_CASES"
    return [case for module in modules for case in getattr(module, sizes)]


def ops_without_cases(device_type: str) -> list[str]:
    """Ops of the table that run in a step on this device and are not measured."""
    covered = {case.op for case in all_cases(torch.device(device_type))}
    here = {op for op, device in KERNELS if device == device_type and not op.startswith(_NOT_TIMED)}
    return sorted(here - covered)


def measure(case: KernelCase, limits: Limits, device: torch.device, *, with_reference: bool = False) -> Measured:
    torch.manual_seed(0)
    sets = [case.make(device)]
    held = sum(tensor.nbytes for tensor in _tensors([*sets[0][0], *sets[0][1].values()]))
    sets += [case.make(device) for _ in range(sets_of_arguments(case.bytes, held, device) - 1)]
    seconds = median_seconds(_calls(kernel(case.op, device.type), sets), device)
    reference_seconds = _reference_seconds(case, sets, device) if with_reference else None
    return Measured(
        op=case.op,
        name=case.name,
        seconds=seconds,
        bytes=case.bytes,
        bytes_per_s=case.bytes / seconds,
        flops=case.flops,
        flops_per_s=case.flops / seconds,
        share=limits.seconds(case.bytes, case.flops) / seconds,
        reference_seconds=reference_seconds,
    )


def _chosen(ops: Sequence[str], device: torch.device) -> list[KernelCase]:
    cases = [case for case in all_cases(device) if (case.op, device.type) in KERNELS]
    known = {case.op for case in cases}
    for op in ops:
        if op not in known:
            raise ConfigError(
                f"--op {op}: no cases on {device.type}. There are: {', '.join(sorted(known))}.", param="op"
            )
    return [case for case in cases if not ops or case.op in ops]


def _reference_seconds(case: KernelCase, sets: Sequence[Arguments], device: torch.device) -> float | None:
    """Time of the torch reference; None if it does not take the arguments because they are packed for the kernel.

    Python launches it, since some references wait for the device.
    """
    modules = (module.name for module in pkgutil.iter_modules(reference.__path__, f"{reference.__name__}."))
    found = (getattr(importlib.import_module(name), case.op, None) for name in modules)
    version = next(filter(callable, found), None)  # all versions of an op have its name
    if version is None:
        return None
    try:
        return median_seconds(_calls(version, sets), device, graph=False)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return None


def _calls(function: Callable[..., Any], sets: Sequence[Arguments]) -> list[Callable[[], object]]:
    return [lambda given=given: function(*given[0], **given[1]) for given in sets]  # type: ignore[misc]


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _cells(result: Measured) -> tuple[str, ...]:
    reference = result.reference_seconds
    return (
        result.op, result.name, f"{result.seconds * 1e6:.2f}", f"{result.bytes / 1e6:.3f}",
        f"{result.bytes_per_s / 1e9:.0f}", f"{result.flops_per_s / 1e12:.1f}", f"{result.share:.0%}",
        "" if reference is None else f"{reference * 1e6:.2f}",
    )  # fmt: skip


def _limits_line(limits: Limits, device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the processor, small sizes"
    return (
        f"Limits of {name}: {limits.bytes_per_s / 1e9:,.0f} GB/s by a copy, "
        f"{limits.flops_per_s / 1e12:,.1f} TFLOP/s by a product in bfloat16"
    )
