"""The statistics of an API process, or of several: each engine's, and what belongs to none.

Knows nothing about Prometheus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine.metrics.gpus import GpuReading
from quire.engine.metrics.histogram import Histogram, WorkTimes
from quire.engine.metrics.stats import Limit, Stats

DURATION_S = (0.1, 0.5, 1.0)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""All others count as OTHER, so that clients cannot invent labels."""
NO_HANDLER = "none"
CPU_SECONDS = "process_cpu_seconds_total"
_START_TIME = "process_start_time_seconds"


class Answered(NamedTuple):
    """What answers are counted by: `handler` is a route's path, `status` its hundred (`2xx`)."""

    method: str
    handler: str
    status: str


@dataclass
class HttpCounts:
    """How many answers to HTTP requests there were, and how long they took: a stream until its last byte; and how many
    seconds of sound requests have brought."""

    answers: dict[Answered, int] = field(default_factory=dict)
    seconds: dict[tuple[str, str], Histogram] = field(default_factory=dict)
    audio_seconds: float = 0.0

    def answered(self, method: str, handler: str | None, status: int, seconds: float) -> None:
        method, handler = method if method in METHODS else "OTHER", handler or NO_HANDLER
        answered = Answered(method, handler, f"{status // 100}xx")
        self.answers[answered] = self.answers.get(answered, 0) + 1
        self.seconds.setdefault((method, handler), Histogram(DURATION_S)).observe(seconds)

    def add(self, other: HttpCounts) -> None:
        """Add what another process has counted."""
        self.audio_seconds += other.audio_seconds
        for answered, number in other.answers.items():
            self.answers[answered] = self.answers.get(answered, 0) + number
        for labels, seconds in other.seconds.items():
            self.seconds.setdefault(labels, Histogram(seconds.bounds)).add(seconds)


@dataclass
class SwapCounts:
    """Swaps of models: how many were done or failed, whether one proceeds, and how many requests wait for a model."""

    done: int = 0
    failed: int = 0
    proceeds: bool = False
    waiting: int = 0


@dataclass
class ServerStats:
    """All that one API process counts, or several together.

    Attributes:
        rejections: Requests that were turned away because too many waited.
        api_restarts: How often API processes were replaced until this one began.
        process: What the system says of the processes, by metric; empty for the process that is asked.
    """

    engines: Sequence[Stats]
    rejections: dict[Limit, int] = field(default_factory=lambda: {"requests": 0, "tokens": 0})
    http: HttpCounts = field(default_factory=HttpCounts)
    api_restarts: int = 0
    callbacks: WorkTimes = field(default_factory=WorkTimes)
    swaps: SwapCounts = field(default_factory=SwapCounts)
    gpus: list[GpuReading] = field(default_factory=list)
    process: dict[str, float] = field(default_factory=dict)

    def continue_counts(self, before: ServerStats) -> None:
        """Keep what the process has counted while it served another model; counts of that model begin anew."""
        self.http, self.callbacks, self.swaps = before.http, before.callbacks, before.swaps


def total(alive: Sequence[ServerStats], gone: Sequence[ServerStats] = ()) -> ServerStats:
    """The statistics of a server with several API processes.

    Args:
        alive: What each process counts. What must not be added up is taken from the first one.
        gone: What ended processes have counted: only counters.
    """
    stats = ServerStats([Stats(engine.engine) for engine in alive[0].engines], gpus=alive[0].gpus)
    for engine, first in zip(stats.engines, alive[0].engines, strict=True):
        engine.share_scales(first)
    for each in (*alive, *gone):
        for limit, number in each.rejections.items():
            stats.rejections[limit] += number
        stats.http.add(each.http)
        stats.callbacks.seconds.add(each.callbacks.seconds)
        stats.callbacks.longest = max(stats.callbacks.longest, each.callbacks.longest)
        for engine, heard in zip(stats.engines, each.engines, strict=True):
            engine.add_requests(heard)
    for number, engine in enumerate(stats.engines):
        engine.add_heard([each.engines[number] for each in alive], [each.engines[number] for each in gone])
    stats.swaps = alive[0].swaps  # models are swapped where there is one process
    stats.api_restarts = max(each.api_restarts for each in (*alive, *gone))
    for each in alive:
        for name, value in each.process.items():
            stats.process[name] = stats.process.get(name, 0.0) + value
    if starts := [each.process[_START_TIME] for each in alive if _START_TIME in each.process]:
        stats.process[_START_TIME] = min(starts)
    if CPU_SECONDS in stats.process:
        stats.process[CPU_SECONDS] += sum(each.process.get(CPU_SECONDS, 0.0) for each in gone)
    return stats
