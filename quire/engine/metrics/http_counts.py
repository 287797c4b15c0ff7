"""Counts of answers to HTTP requests, by what was asked and how it was answered. Knows nothing about ASGI."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from quire.engine.metrics.histogram import Histogram

DURATION_S = (0.1, 0.5, 1.0)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""All others count as OTHER: what clients invent must not become labels."""
NO_HANDLER = "none"


class Answered(NamedTuple):
    """What answers are counted by: `handler` is a route's path, `status` its hundred (`2xx`)."""

    method: str
    handler: str
    status: str


class HttpCounts:
    """How many answers there were, and how long they took.

    Attributes:
        answers: By method, handler and status.
        seconds: By method and handler; a stream's until its last byte.
    """

    def __init__(self) -> None:
        self.answers: Counter[Answered] = Counter()
        self.seconds: dict[tuple[str, str], Histogram] = {}

    def answered(self, method: str, handler: str | None, status: int, seconds: float) -> None:
        """A request is over."""
        method, handler = method if method in METHODS else "OTHER", handler or NO_HANDLER
        self.answers[Answered(method, handler, f"{status // 100}xx")] += 1
        self.seconds.setdefault((method, handler), Histogram(DURATION_S)).observe(seconds)
