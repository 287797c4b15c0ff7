"""Where the device's time goes, by kernel: one decode step of a batch, or one prompt."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from workloads import Generate, Workloads

KernelTimes = dict[str, tuple[float, float]]
"""By kernel: microseconds, and how many launches."""

SHOWN = 20
_STEPS = 16
_NAME_WIDTH = 76


def decode_profile(generate: Generate, workloads: Workloads, batch: int) -> list[str]:
    """Lines of a table: one step of `batch` sequences, 128 tokens behind."""

    def run(outputs: int) -> float:
        return generate([workloads.prompt(128) for _ in range(batch)], [outputs] * batch)

    step_ms = (run(_STEPS + 1) - run(1)) / _STEPS * 1e3
    first, more = (_kernels(lambda n=n: run(n)) for n in (1, _STEPS + 1))
    times = {}
    for name, (microseconds, launches) in more.items():
        before = first.get(name, (0.0, 0.0))
        if launches > before[1]:
            times[name] = ((microseconds - before[0]) / _STEPS, (launches - before[1]) / _STEPS)
    return _table(times, step_ms)


def first_token_profile(generate: Generate, workloads: Workloads, length: int) -> list[str]:
    """Lines of a table: one prompt of `length` tokens, and its first token."""

    def run() -> float:
        return generate([workloads.prompt(length)], [1])

    run()
    milliseconds = run() * 1e3
    return _table(_kernels(run), milliseconds)


def _kernels(run: Callable[[], float]) -> KernelTimes:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    return {
        event.key: (event.self_device_time_total, event.count)
        for event in profiled.key_averages()
        if event.device_type == DeviceType.CUDA
    }


def _table(times: KernelTimes, wall_ms: float) -> list[str]:
    """The kernels that take most, with their share of all kernels' time."""
    total = sum(microseconds for microseconds, _ in times.values())
    ordered = sorted(times.items(), key=lambda item: -item[1][0])
    lines = [f"{total / 1e3:.3f} ms in kernels of {wall_ms:.3f} ms ({total / 1e3 / wall_ms:.0%})"]
    for name, (microseconds, launches) in ordered[:SHOWN]:
        share = microseconds / total if total else 0.0
        lines.append(f"{microseconds:>10.1f} µs {share:>6.1%} {launches:>7.1f} ×  {name[:_NAME_WIDTH]}")
    rest = ordered[SHOWN:]
    if rest:
        lines.append(f"{sum(t for _, (t, _) in rest):>10.1f} µs in {len(rest)} others")
    return lines
