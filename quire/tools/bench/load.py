"""When requests are sent, how they are sent, and what came of all of them together.

An open loop sends at its own times, with random gaps or a ramp, whether or not answers have come. A closed loop keeps a
number of requests open, one after another, with random lengths. Engines and servers are timed by closed loops: their
steps mix decoding rows, parts of prompts and contexts of all lengths, as real loads do.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from quire.errors import ConfigError
from quire.foundation.config.values import check_positive
from quire.tools.bench.client import Client, Outcome
from quire.tools.bench.datasets import Sample
from quire.tools.bench.report import rates


@dataclass(frozen=True)
class ArrivalOptions:
    """How fast requests come."""

    request_rate: float = math.inf
    """Requests a second. inf: all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of gaps: 1 is a Poisson process, less comes in bursts, more is more even."""
    max_concurrency: int | None = None
    """Maximum requests at a time; later ones wait in the client, and their clock starts when they are sent."""
    ramp_up_strategy: Literal["linear", "exponential"] | None = None
    """Let the rate grow from --ramp-up-start-rps to --ramp-up-end-rps."""
    ramp_up_start_rps: float | None = None
    """Rate at the beginning of a ramp."""
    ramp_up_end_rps: float | None = None
    """Rate at the end of a ramp."""

    def __post_init__(self) -> None:
        check_positive(self, "request_rate", "burstiness", "max_concurrency", "ramp_up_start_rps", "ramp_up_end_rps")
        ends = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if (self.ramp_up_strategy is None) != (None in ends) or (ends.count(None) == 1):
            raise ConfigError(
                "A ramp needs --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps.", param="ramp_up_strategy"
            )
        if self.ramp_up_strategy is not None and self.request_rate != math.inf:
            raise ConfigError("Give --request-rate or a ramp, not both.", param="request_rate")


def arrival_times(options: ArrivalOptions, count: int, rng: random.Random) -> list[float]:
    """Seconds after the beginning at which each of `count` requests is sent, ascending from 0.

    Without a ramp the times are scaled so that the whole takes what the rate promises.
    """
    times = [0.0]
    for number in range(1, count):
        rate = _rate(options, number / max(1, count - 1))
        gap = 0.0 if rate == math.inf else rng.gammavariate(options.burstiness, 1 / (rate * options.burstiness))
        times.append(times[-1] + gap)
    if options.ramp_up_strategy is None and times[-1] > 0:
        scale = (count - 1) / options.request_rate / times[-1]
        times = [time * scale for time in times]
    return times


def _rate(options: ArrivalOptions, progress: float) -> float:
    start, end = options.ramp_up_start_rps, options.ramp_up_end_rps
    if options.ramp_up_strategy is None or start is None or end is None:
        return options.request_rate
    if options.ramp_up_strategy == "linear":
        return start + (end - start) * progress
    return start * math.exp(progress * math.log(end / start))


REQUESTS = {1: 8, 3: 15, 8: 32, 24: 72}
"""How many requests a load has, by how many are open at a time."""
PROMPTS, OUTPUTS = (16, 512), (8, 64)
"""Fewest and most tokens. Prompts are drawn so that all orders of magnitude are as frequent."""


@dataclass(frozen=True)
class ClosedLoad:
    """Tokens of each request's prompt and output, in order; `open` requests run at a time."""

    open: int
    lengths: tuple[tuple[int, int], ...]


def closed_loads(most: int, longest: int, seed: int) -> list[ClosedLoad]:
    """Loads from few to at most `most` requests at a time, with sequences of at most `longest` tokens."""
    draw = random.Random(seed)
    outputs = tuple(max(1, min(bound, longest // 4)) for bound in OUTPUTS)
    prompts = tuple(max(1, min(bound, longest - outputs[1] - 1)) for bound in PROMPTS)

    def lengths() -> tuple[int, int]:
        share = draw.random()
        return round(prompts[0] ** (1 - share) * prompts[1] ** share), draw.randint(*outputs)

    return [ClosedLoad(n, tuple(lengths() for _ in range(count))) for n, count in REQUESTS.items() if n <= most]


PEAK_WINDOW_S = 1.0


@dataclass(frozen=True)
class Load:
    """A finished run: outcomes in the order of the samples, its begin on `time.perf_counter`, and seconds from the
    first request to the last answer.

    Attributes:
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
    client: Client,
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
