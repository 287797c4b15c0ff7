"""Where the devices' time goes, by kernel: one decode step of a batch, or one prompt. A rank's kernels that wait for
another rank count too: of a pipeline, `_receive_stream` and `_take_tokens` show how long a stage idles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workloads import Generate, Workloads

from quire.runtime.worker.kernel_profile import KernelProfile

KernelTimes = dict[str, tuple[float, float]]
"""By kernel: microseconds, and how many launches."""
Profiled = Callable[[Callable[[], object]], Sequence[KernelTimes]]
"""What kernels take while something runs, by rank."""

SHOWN = 20
_STEPS = 16
_NAME_WIDTH = 76


def of_this_process(run: Callable[[], object]) -> list[KernelTimes]:
    """Where there is one rank."""
    profile = KernelProfile()
    run()
    return [dict(profile.end())]


def decode_profile(generate: Generate, profiled: Profiled, workloads: Workloads, batch: int) -> list[str]:
    """Lines of a table for each rank: one step of `batch` sequences, 128 tokens behind. A pipeline runs as many steps
    as it has stages for one token of each; they count as one."""

    def run(outputs: int) -> float:
        return generate([workloads.prompt(128) for _ in range(batch)], [outputs] * batch)

    step_ms = (run(_STEPS + 1) - run(1)) / _STEPS * 1e3
    first, more = (profiled(lambda n=n: run(n)) for n in (1, _STEPS + 1))
    return _tables([_difference(*both) for both in zip(first, more, strict=True)], step_ms)


def first_token_profile(generate: Generate, profiled: Profiled, workloads: Workloads, length: int) -> list[str]:
    """Lines of a table for each rank: one prompt of `length` tokens, and its first token."""

    def run() -> float:
        return generate([workloads.prompt(length)], [1])

    run()
    milliseconds = run() * 1e3
    return _tables(profiled(run), milliseconds)


def _difference(first: KernelTimes, more: KernelTimes) -> KernelTimes:
    """A step's, of runs of which the second has _STEPS more."""
    times = {}
    for name, (microseconds, launches) in more.items():
        before = first.get(name, (0.0, 0.0))
        if launches > before[1]:
            times[name] = ((microseconds - before[0]) / _STEPS, (launches - before[1]) / _STEPS)
    return times


def _tables(of_ranks: Sequence[KernelTimes], wall_ms: float) -> list[str]:
    """One rank's behind another's."""
    if len(of_ranks) == 1:
        return _table(of_ranks[0], wall_ms)
    return [line for rank, times in enumerate(of_ranks) for line in (f"rank {rank}", *_table(times, wall_ms))]


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
