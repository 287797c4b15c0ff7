"""A load: when requests arrive, how long they are, and what they share."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from quire.tools.bench.arrivals import ArrivalOptions, arrival_times
from quire.tools.bench.datasets import Sample
from quire.tools.bench.tokens import Tokens


@dataclass(frozen=True)
class TraceRequest:
    """One request.

    Attributes:
        arrival: Seconds after the beginning of the load.
        prompt, output: Numbers of tokens.
        parts: The parts that the prompt begins with, as (name, tokens), in order. Requests share the tokens of equal
            first parts; the rest of the prompt is a request's own.
        ids: The prompt's tokens, if they are known.
    """

    arrival: float
    prompt: int
    output: int
    parts: tuple[tuple[str, int], ...] = ()
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Trace:
    """Requests by arrival.

    `concurrency` is the maximum at a time; later ones wait in the client, and their clock starts when they are sent.
    """

    requests: tuple[TraceRequest, ...]
    concurrency: int | None = None

    @property
    def seconds(self) -> float:
        """Seconds from the first to the last arrival."""
        return self.requests[-1].arrival - self.requests[0].arrival

    @property
    def rate(self) -> float:
        """Requests a second; infinite if all come at once."""
        return (len(self.requests) - 1) / self.seconds if self.seconds else float("inf")

    def at_rate(self, rate: float) -> Trace:
        """This load with its gaps stretched, so that requests come at this rate on average. A load without gaps gets
        those of a Poisson process."""
        if not self.seconds:
            times = arrival_times(ArrivalOptions(request_rate=rate), len(self.requests), random.Random(0))
        else:
            first, scale = self.requests[0].arrival, self.rate / rate
            times = [(request.arrival - first) * scale for request in self.requests]
        return replace(self, requests=tuple(replace(r, arrival=t) for r, t in zip(self.requests, times, strict=True)))

    def at_once(self) -> Trace:
        return replace(self, requests=tuple(replace(request, arrival=0.0) for request in self.requests))

    def token_ids(self, vocab_size: int, seed: int = 0) -> Iterator[list[int]]:
        """The prompts' token ids, in order: known ones, or random ones that are equal in shared parts only."""
        draw = np.random.default_rng(seed)
        shared: dict[tuple[str, int], list[int]] = {}
        for request in self.requests:
            if request.ids is not None:
                yield list(request.ids)
                continue
            tokens: list[int] = []
            for part in request.parts:
                if part not in shared:
                    shared[part] = draw.integers(0, vocab_size, part[1]).tolist()
                tokens += shared[part]
            yield tokens[: request.prompt] + draw.integers(0, vocab_size, max(0, request.prompt - len(tokens))).tolist()


def from_samples(samples: Sequence[Sample], tokens: Tokens, times: Sequence[float], concurrency: int | None) -> Trace:
    """A dataset whose samples are sent at these times (seconds). `tokens` encodes samples of text."""
    prompts = [s.prompt if isinstance(s.prompt, list) else tokens.encode(s.prompt) for s in samples]
    requests = [
        TraceRequest(time, len(ids), sample.output_len, ids=tuple(ids))
        for time, ids, sample in zip(times, prompts, samples, strict=True)
    ]
    return Trace(tuple(requests), concurrency)


def from_requests(requests: Sequence[TraceRequest], most: int, concurrency: int | None) -> Trace:
    """A trace of the first `most` requests of a file, which begins at 0."""
    chosen = list(islice(sorted(requests, key=lambda request: request.arrival), most))
    first = chosen[0].arrival
    return Trace(tuple(replace(r, arrival=r.arrival - first) for r in chosen), concurrency)
