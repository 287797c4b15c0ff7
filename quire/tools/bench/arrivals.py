"""When requests are sent.

An open loop sends at its own times, with random gaps or a ramp, whether or not answers have come. A closed loop keeps a
number of requests open, one after another, with random lengths. Engines and servers are timed by closed loops: their
steps mix decoding rows, parts of prompts and contexts of all lengths, as real loads do.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

from quire.errors import ConfigError


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
        for name in ("request_rate", "burstiness", "max_concurrency", "ramp_up_start_rps", "ramp_up_end_rps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {value}.", param=name)
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
