"""`quire bench kernels`: every op of the kernel table on its own, beside the least time its bytes and operations need.

The cases are those of `quire.tools.bench.kernel_cases`. On a GPU all of them run; elsewhere the small ones, which show
that an op works but say nothing about speed.
"""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from quire.compute.kernels import reference
from quire.compute.kernels.dispatch import KERNELS, kernel
from quire.errors import ConfigError
from quire.tools.bench import kernel_cases
from quire.tools.bench.device_timing import Limits, measure_limits, median_seconds, sets_of_arguments
from quire.tools.bench.kernel_cases import Arguments, KernelCase
from quire.tools.bench.report import measured_with, write_json

_NOT_TIMED = ("pack_",)
"""Ops that run once at the start have no cases."""
_HEADINGS = ("µs", "MB", "GB/s", "TFLOP/s", "of limit")


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
    """The cases of these ops (of all, if none is named) that the device has a kernel for."""
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
