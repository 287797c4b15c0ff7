"""The statistics of one API process: each engine's, and what belongs to none. Knows nothing about Prometheus."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.metrics.gpus import GpuReading
from quire.engine.metrics.http_counts import HttpCounts
from quire.engine.metrics.stats import Limit, Stats
from quire.engine.metrics.swap_counts import SwapCounts
from quire.engine.metrics.work_times import WorkTimes


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
        swaps: Of models.
        gpus: As they were last read, each with its engine.
        process: What the system says of several processes together, by metric; empty: this one is asked.
    """

    def __init__(self, engines: Sequence[Stats]) -> None:
        self.engines = tuple(engines)
        self.rejections: dict[Limit, int] = {"requests": 0, "tokens": 0}
        self.http = HttpCounts()
        self.api_restarts = 0
        self.callbacks = WorkTimes()
        self.swaps = SwapCounts()
        self.gpus: list[GpuReading] = []
        self.process: dict[str, float] = {}

    def continue_counts(self, before: ServerStats) -> None:
        """Another model was served before: what belongs to this process goes on being counted. What belongs to the
        model begins anew, unless it is handed over."""
        self.http, self.callbacks, self.swaps = before.http, before.callbacks, before.swaps

    def hand_over(self, successor: ServerStats) -> None:
        """A model of the same name takes the place of this one, see Stats."""
        for own, other in zip(self.engines, successor.engines, strict=False):  # one may have fewer
            own.hand_over(other)
        for limit, count in self.rejections.items():
            successor.rejections[limit] += count
            self.rejections[limit] = 0
