"""A load: when requests arrive, how long they are, what they share. Knows nothing about engines or files."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from quire.bench.arrivals import ArrivalOptions, arrival_times


@dataclass(frozen=True)
class TraceRequest:
    """One request.

    Attributes:
        arrival: Seconds after the beginning of the load.
        prompt: Tokens of its prompt.
        output: Tokens of its output.
        parts: What the prompt begins with, as (name, tokens), in order: requests whose first parts are the same share
            these tokens. The rest of the prompt is its own.
    """

    arrival: float
    prompt: int
    output: int
    parts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Trace:
    """A load.

    Attributes:
        requests: By arrival.
        concurrency: Most requests at a time; later ones wait in the client, and count from when they are sent.
    """

    requests: tuple[TraceRequest, ...]
    concurrency: int | None = None

    @property
    def seconds(self) -> float:
        """From the first to the last arrival."""
        return self.requests[-1].arrival - self.requests[0].arrival

    @property
    def rate(self) -> float:
        """Requests a second; infinite if all come at once."""
        return (len(self.requests) - 1) / self.seconds if self.seconds else float("inf")

    def at_rate(self, rate: float) -> Trace:
        """The same requests with gaps stretched so that they come at this rate on average; a trace without gaps gets
        those of a Poisson process."""
        if not self.seconds:
            times = arrival_times(ArrivalOptions(request_rate=rate), len(self.requests), random.Random(0))
        else:
            first, scale = self.requests[0].arrival, self.rate / rate
            times = [(request.arrival - first) * scale for request in self.requests]
        return replace(self, requests=tuple(replace(r, arrival=t) for r, t in zip(self.requests, times, strict=True)))

    def token_ids(self, vocab_size: int, seed: int = 0) -> Iterator[list[int]]:
        """The prompts, in order: ids that nobody else has, but for the parts that are shared."""
        draw = np.random.default_rng(seed)
        shared: dict[tuple[str, int], list[int]] = {}
        for request in self.requests:
            tokens: list[int] = []
            for part in request.parts:
                if part not in shared:
                    shared[part] = draw.integers(0, vocab_size, part[1]).tolist()
                tokens += shared[part]
            yield tokens[: request.prompt] + draw.integers(0, vocab_size, max(0, request.prompt - len(tokens))).tolist()


@dataclass(frozen=True)
class LoadOptions:
    """A load that is made up, for where no file has one."""

    num_prompts: int = 200
    """Requests; of a file, at most so many."""
    input_len: int = 512
    """Tokens of a prompt, its prefix included."""
    output_len: int = 128
    """Tokens of an output."""
    range_ratio: float = 0.0
    """Lengths are drawn from length × (1 ± this)."""
    prefix_len: int = 0
    """Tokens that prompts share with others."""
    num_prefixes: int = 1
    """How many different prefixes there are."""


def made_up(options: LoadOptions, arrivals: ArrivalOptions, rng: random.Random) -> Trace:
    """A load with these arrivals and lengths."""
    times = arrival_times(arrivals, options.num_prompts, rng)

    def around(length: int) -> int:
        low, high = length * (1 - options.range_ratio), length * (1 + options.range_ratio)
        return max(1, rng.randint(round(low), round(high)))

    requests = []
    for time in times:
        prefix = (f"prefix {rng.randrange(options.num_prefixes)}", options.prefix_len)
        prompt = max(around(options.input_len), options.prefix_len + 1)
        requests.append(TraceRequest(time, prompt, around(options.output_len), (prefix,) if options.prefix_len else ()))
    return Trace(tuple(requests), arrivals.max_concurrency)


def from_requests(requests: Sequence[TraceRequest], most: int, concurrency: int | None) -> Trace:
    """A trace of the first requests of a file, from 0 on."""
    chosen = list(islice(sorted(requests, key=lambda request: request.arrival), most))
    first = chosen[0].arrival
    return Trace(tuple(replace(r, arrival=r.arrival - first) for r in chosen), concurrency)
