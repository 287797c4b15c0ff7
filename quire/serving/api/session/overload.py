"""Tells a server that is offered more than it can do from one that a burst keeps busy for a while.

Both have a queue. A burst is let in and worked off, however long it makes the queue. Under overload each request that
is let in would wait as long as the queue may be, and the device would do no more for it; so the queue is kept short.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from quire.foundation.clock import Clock

MAX_DELAY_S = 0.75
"""The queue stands if all sequences that began lately waited longer (`Load.queue_delay_s`)."""
GROWTH_WINDOW_S = 1.4
"""More arrives than ends if the number of open requests has grown over so many seconds, and at
their beginning and in the last RECENT_S at no less than a quarter of that rate."""
BEGINNING_S = 0.2
RECENT_S = 0.4
MIN_GROWTH = 16
"""Requests, beyond the most that were open in the last PEAK_S before. Clients that wait for their answers before they
send more never bring that once all have begun, even if all their answers end together."""
PEAK_S = 30.0
BURST_QUEUE_S = 8.0
"""A queue that takes longer to work off has come so fast that a burst is likelier: it is watched for twice as long."""
LASTING_S = 3.0
"""Overload ends when for so long no more arrived than ended."""
_SAMPLE_S = 0.1


class _Sample(NamedTuple):
    """How many requests were open or had been turned away, at a time."""

    time: float
    offered: int


class OverloadDetector:
    """Decides at each arrival whether there is overload, from the arrivals and ends before."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._samples: deque[_Sample] = deque()  # the first is the latest that is older than what is looked at
        self._refused = 0
        self._ends = 0.0

    def arrived(self, open_requests: int, delay_s: float, queue_s: float) -> bool:
        """Whether there is overload.

        Args:
            open_requests: Requests that run or wait now, however many sequences each has.
            delay_s: The engines' smallest `Load.queue_delay_s`.
            queue_s: How many seconds the engines need for the queue.
        """
        now, offered = self._clock.now(), open_requests + self._refused
        self._sample(now, offered)
        if delay_s > MAX_DELAY_S or now < self._ends:
            seconds = (2 if queue_s > BURST_QUEUE_S else 1) * GROWTH_WINDOW_S
            if self._has_grown(now, seconds, offered):
                self._ends = now + LASTING_S
        return now < self._ends

    def refused(self) -> None:
        """Note that a request was turned away: it would be open now."""
        self._refused += 1

    def came_back(self) -> None:
        """Note that a request that was turned away is sent again: it is open from now on, or is turned away again."""
        self._refused -= self._refused > 0

    def _sample(self, now: float, offered: int) -> None:
        samples = self._samples
        if not samples or now - samples[-1].time >= _SAMPLE_S:
            samples.append(_Sample(now, offered))
        while len(samples) > 1 and samples[1].time <= now - PEAK_S:
            samples.popleft()

    def _has_grown(self, now: float, seconds: float, offered: int) -> bool:
        begin = now - seconds
        if self._samples[0].time > begin:
            return False
        peak = max(sample.offered for sample in self._samples if sample.time <= begin)
        before, beginning, recent = map(self._at, (begin, begin + BEGINNING_S, now - RECENT_S))
        least = (offered - before) / seconds / 4
        is_steady = (beginning - before) / BEGINNING_S >= least and (offered - recent) / RECENT_S >= least
        return offered - peak >= MIN_GROWTH and is_steady

    def _at(self, time: float) -> int:
        return next(sample.offered for sample in reversed(self._samples) if sample.time <= time)
