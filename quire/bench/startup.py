"""`quire bench startup`: how long an engine takes from its process's start until it takes work, by stage.

Each iteration is a new engine process, as `quire serve` starts it. Cold: the model's files are dropped from the
operating system's cache before.
"""

from __future__ import annotations

import os
import selectors
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.progress import progress
from quire.bench.report import Row, measured_with, table, write_json
from quire.bench.summary import summarize
from quire.child import Launch, Report, raise_failure
from quire.config import Config
from quire.engine.choices import choose
from quire.errors import ConfigError, QuireError
from quire.supervisor.process import ChildProcess

DESCRIPTION = "Measure how long the engine takes to start, cold (files not cached) and warm."
PERCENTILES = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)
END_S = 10.0
TOTAL, REST = "total", "process"


@dataclass(frozen=True)
class StartupOptions:
    """How often."""

    num_iters_cold: int = 3
    """Cold starts."""
    num_iters_warmup: int = 1
    """Starts before the warm ones."""
    num_iters_warm: int = 3
    """Warm starts."""
    output_json: str | None = None
    """Write the result to this file."""


def run(options: StartupOptions, config: Config) -> int:
    """Measure and report; the exit code.

    Raises:
        QuireError: Options that cannot be meant, or a model that cannot be served.
    """
    counts = (options.num_iters_cold, options.num_iters_warmup, options.num_iters_warm)
    if min(counts) < 0 or not counts[0] + counts[2]:
        raise ConfigError("--num-iters-cold and --num-iters-warm must ask for at least one start.")
    choices = choose(config)
    with progress("Starts", sum(counts)) as advance:
        cold = []
        for _ in range(options.num_iters_cold):
            _drop_from_cache(Path(choices.config.model.model))
            cold.append(_start(choices.config))
            advance()
        for _ in range(options.num_iters_warmup):
            _start(choices.config)
            advance()
        warm = []
        for _ in range(options.num_iters_warm):
            warm.append(_start(choices.config))
            advance()
    _publish(options, choices.config, {"cold": cold, "warm": warm})
    return 0


def _start(config: Config) -> dict[str, float]:
    """Seconds by stage of one engine process, which is ended again."""
    with tempfile.TemporaryDirectory(prefix="quire-") as directory:
        began = time.perf_counter()
        child = ChildProcess("engine", "quire.engine.process", Launch(config, directory))
        try:
            report = _wait(child)
            total = time.perf_counter() - began
        finally:
            child.signal(signal.SIGTERM)
            _wait_for_end(child)
            child.close()
    return {TOTAL: total, REST: total - sum(report.startup.values()), **report.startup}


def _wait(child: ChildProcess) -> Report:
    """Until the engine is ready.

    Raises:
        QuireError: It failed.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(child.report_fd, selectors.EVENT_READ)
        selector.register(child.pid_fd, selectors.EVENT_READ)
        while True:
            selector.select()
            for report in child.reports():
                if report.state == "ready":
                    return report
                raise_failure(report)
            if child.exit_code() is not None:
                raise QuireError(f"The engine did not start: {child.cause_of_death()}.")


def _wait_for_end(child: ChildProcess) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(child.pid_fd, selectors.EVENT_READ)
        if not selector.select(END_S):
            child.signal(signal.SIGKILL)
            selector.select(END_S)
    child.exit_code()


def _drop_from_cache(directory: Path) -> None:
    """Ask the operating system to forget the files' contents."""
    for path in directory.iterdir():
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _publish(options: StartupOptions, config: Config, starts: dict[str, list[dict[str, float]]]) -> None:
    result: dict[str, Any] = measured_with(options, config)
    sections: list[tuple[str, Sequence[Row]]] = []
    for kind, runs in starts.items():
        if not runs:
            continue
        totals = summarize([run[TOTAL] for run in runs], PERCENTILES)
        result[f"avg_{kind}_startup_time"] = totals.mean
        result[f"{kind}_startup_times"] = [run[TOTAL] for run in runs]
        result[f"{kind}_startup_percentiles"] = {f"{p:g}": value for p, value in totals.percentiles.items()}
        result[f"{kind}_startup_stages"] = runs
        stages = {stage: summarize([run.get(stage, 0.0) for run in runs], ()) for stage in runs[0]}
        rows = [(stage, f"{found.mean:.3f} ± {found.ci95:.3f}") for stage, found in stages.items()]
        sections.append((f"{kind}, {len(runs)} start(s)", rows))
    print(table("Startup benchmark result, seconds (± 95% confidence)", sections))
    if options.output_json is not None:
        write_json(options.output_json, result)
