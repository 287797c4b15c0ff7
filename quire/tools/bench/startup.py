"""`quire bench startup`: how long an engine takes from its process's start until it takes work, by stage.

Each iteration starts a new process: a script with `LLM`, `quire serve`, or the engine process that this starts. A start
is cold if no kernel has been compiled before, which matters on a GPU only. The operating system's cache holds the
model's files, unless --drop-files asks to drop them.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from quire.errors import ConfigError, QuireError
from quire.foundation.config import Config, environment
from quire.foundation.processes.child_main import raise_reported_failure
from quire.foundation.processes.child_process import ChildProcess
from quire.foundation.processes.launch import STOP_ENGINE, LaunchConfig, StatusReport
from quire.planning.auto_config import resolve
from quire.tools.bench.report import Row, measured_with, progress, summarize, table, write_json
from quire.tools.bench.server_times import serve_command

PERCENTILES = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)
END_S = 10.0
TOTAL, REST = "total", "process"
MODULES = {"llm": "quire.tools.bench.llm_process", "engine": "quire.engine.start"}


@dataclass(frozen=True)
class StartupOptions:
    """What is started, and how often."""

    DESCRIPTION: ClassVar[str] = (
        "Measure how long an engine takes to start, cold (nothing compiled) and warm, by stage."
    )

    start: Literal["llm", "server", "engine"] = "llm"
    """A script's LLM, all of quire serve, or its engine process alone."""
    num_iters_cold: int = 3
    """Cold starts: with an empty directory for compiled kernels."""
    num_iters_warmup: int = 1
    """Starts before the warm ones."""
    num_iters_warm: int = 3
    """Warm starts."""
    drop_files: bool = False
    """Before cold starts, ask the operating system to forget the model's files too."""
    output_json: str | None = None
    """Write the result to this file."""


def run(options: StartupOptions, config: Config) -> int:
    """Measure and report; returns the exit code. Raises QuireError for wrong options or a model that is not served."""
    counts = (options.num_iters_cold, options.num_iters_warmup, options.num_iters_warm)
    if min(counts) < 0 or not counts[0] + counts[2]:
        raise ConfigError("--num-iters-cold and --num-iters-warm must ask for at least one start.")
    resolved = resolve(config)
    cold, warm = [], []
    with progress("Starts", sum(counts)) as advance:
        for _ in range(options.num_iters_cold):
            if options.drop_files:
                _drop_from_cache(Path(resolved.config.model.model))
            with tempfile.TemporaryDirectory(prefix="quire-") as empty, environment.kernels_cached_in(Path(empty)):
                cold.append(_started(options.start, config, resolved.config))
            advance()
        for number in range(options.num_iters_warmup + options.num_iters_warm):
            seconds = _started(options.start, config, resolved.config)
            if number >= options.num_iters_warmup:
                warm.append(seconds)
            advance()
    _publish(options, resolved.config, {"cold": cold, "warm": warm})
    return 0


def _started(kind: Literal["llm", "server", "engine"], asked: Config, chosen: Config) -> dict[str, float]:
    """Start a process, and end it when it is ready; returns its seconds by stage. Raises QuireError if it failed."""
    with tempfile.TemporaryDirectory(prefix="quire-") as directory:
        began = time.perf_counter()
        if kind == "server":
            starting = _server(asked, Path(directory))
        else:
            starting = _child(MODULES[kind], LaunchConfig(chosen if kind == "engine" else asked, directory))
        with starting as stages:
            total = time.perf_counter() - began
    return {TOTAL: total, REST: total - sum(stages.values()), **stages}


@contextmanager
def _child(module: str, launch: LaunchConfig) -> Iterator[dict[str, float]]:
    """Yield the stages of a child process once it is ready, and end it afterwards."""
    child = ChildProcess("engine", module, launch)
    try:
        yield _wait(child).startup
    finally:
        child.signal(STOP_ENGINE)
        _wait_for_end(child)
        child.close()


@contextmanager
def _server(config: Config, directory: Path) -> Iterator[dict[str, float]]:
    """Yield the stages of a server's engine once the server is ready, and end it afterwards."""
    server = subprocess.Popen(serve_command(config, directory), stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        said = []
        for line in server.stderr:
            said.append(line)
            if line.startswith("Ready in"):
                break
        else:
            raise QuireError(f"The server did not start: {said[-1].strip() if said else 'it said nothing'}")
        yield {stage: float(seconds) for stage, seconds in re.findall(r"(\w+) ([\d.]+)[,)]", line)}
    finally:
        server.terminate()
        server.communicate()


def _wait(child: ChildProcess) -> StatusReport:
    """Wait until the engine is ready. Raises QuireError if it failed."""
    with selectors.DefaultSelector() as selector:
        selector.register(child.report_fd, selectors.EVENT_READ)
        selector.register(child.pid_fd, selectors.EVENT_READ)
        while True:
            selector.select()
            for report in child.reports():
                match report:
                    case StatusReport("ready"):
                        return report
                    case StatusReport():
                        raise_reported_failure(report)
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
