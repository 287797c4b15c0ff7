"""The statistics of one API process: each engine's, and what belongs to none. Knows nothing about Prometheus."""

from __future__ import annotations

from collections.abc import Sequence

from quire.metrics.gpus import GpuReading
from quire.metrics.http_counts import HttpCounts
from quire.metrics.stats import Limit, Stats
from quire.metrics.work_times import WorkTimes


class ServerStats:
    """All that is counted.

    Args:
        engines: Statistics by engine.

    Attributes:
        engines: As given.
        rejections: Requests that were turned away because too many waited.
        http: Answers to HTTP requests.
        api_restarts: How often this process was replaced.
        callbacks: Of the event loop.
        gpus: As they were last read, each with its engine.
    """

    def __init__(self, engines: Sequence[Stats]) -> None:
        self.engines = tuple(engines)
        self.rejections: dict[Limit, int] = {"requests": 0, "tokens": 0}
        self.http = HttpCounts()
        self.api_restarts = 0
        self.callbacks = WorkTimes()
        self.gpus: list[GpuReading] = []

    def continue_counts(self, before: ServerStats) -> None:
        """Another model was served before: what belongs to this process goes on being counted. What belongs to the
        model begins anew."""
        self.http, self.callbacks = before.http, before.callbacks
