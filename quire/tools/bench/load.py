"""Sending many requests at their times, and what came of all of them together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from quire.tools.bench.client import Outcome, StreamingClient
from quire.tools.bench.datasets import Sample
from quire.tools.bench.plot import rates

PEAK_WINDOW_S = 1.0


@dataclass(frozen=True)
class Load:
    """A finished run.

    Attributes:
        outcomes: In the order of the samples.
        begin: When it began, on `time.perf_counter`.
        duration: Seconds from the first request to the last answer.
        client_cpu: Share of one core that this process used; near 1 the client is what was measured.
        max_send_delay: Maximum seconds by which a request was sent late, because the client was slow or at its limit of
            concurrency.
    """

    outcomes: list[Outcome]
    begin: float
    duration: float
    client_cpu: float
    max_send_delay: float

    @property
    def completed(self) -> list[Outcome]:
        """The outcomes without an error."""
        return [outcome for outcome in self.outcomes if not outcome.error]

    def in_flight(self) -> list[tuple[float, int]]:
        """How many requests were open: seconds since the beginning, and the number from then on."""
        starts = [(outcome.start - self.begin, 1) for outcome in self.outcomes]
        ends = [(outcome.end - self.begin, -1) for outcome in self.outcomes]
        changes = sorted(starts + ends)
        return list(zip((at for at, _ in changes), accumulate(step for _, step in changes), strict=True))

    def token_rates(self, buckets: int) -> tuple[list[float], list[float]]:
        """Output tokens a second in equal parts of the run: the parts' edges in seconds, and the rate after each."""
        return rates(self._token_times(), self.duration, buckets)

    def peak_token_rate(self) -> float:
        """The most output tokens in any one second; for a shorter run its mean rate."""
        times = sorted(self._token_times())
        best = running = 0.0
        first = 0
        for at, tokens in times:
            running += tokens
            while times[first][0] <= at - PEAK_WINDOW_S:
                running -= times[first][1]
                first += 1
            best = max(best, running)
        return best / min(PEAK_WINDOW_S, self.duration)

    def _token_times(self) -> list[tuple[float, float]]:
        """When output came (seconds since the beginning) and how many tokens.

        The server counts tokens by request only, so a request's tokens are spread evenly over its events.
        """
        found = []
        for outcome in self.completed:
            first = outcome.e2e_latency if outcome.ttft is None else outcome.ttft
            at, tokens = outcome.start - self.begin + first, outcome.output_tokens
            for gap in (0.0, *outcome.itls):
                at += gap
                found.append((at, tokens / (len(outcome.itls) + 1)))
        return found


async def run_load(
    client: StreamingClient,
    samples: Sequence[Sample],
    times: Sequence[float],
    max_concurrency: int | None,
    ended: Callable[[], None],
) -> Load:
    """Send each sample at its time (seconds from now), at most `max_concurrency` at once, and wait for all.

    `ended` is called after each request.
    """
    gate: contextlib.AbstractAsyncContextManager[object] = (
        contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )
    outcomes: list[Outcome | None] = [None] * len(samples)
    begin, cpu = time.perf_counter(), time.process_time()

    async def one(number: int) -> None:
        await asyncio.sleep(begin + times[number] - time.perf_counter())
        async with gate:
            outcomes[number] = await client.ask(samples[number])
        ended()

    async with asyncio.TaskGroup() as tasks:
        for number in range(len(samples)):
            tasks.create_task(one(number))
    finished = [outcome for outcome in outcomes if outcome is not None]
    duration = time.perf_counter() - begin
    late = max(outcome.start - begin - at for outcome, at in zip(finished, times, strict=True))
    return Load(finished, begin, duration, (time.process_time() - cpu) / duration, max(0.0, late))
