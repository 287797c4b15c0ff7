"""A load: when requests arrive, how long they are, and what they share; and loads that others have written down.

| file | what it is |
|---|---|
| .csv | BurstGPT: Timestamp (seconds), Request tokens, Response tokens; requests without a response are left out |
| .jsonl with `timestamp` | Mooncake's, Alibaba's and vLLM's timed traces: input_length, output_length, hash_ids |
| .json with `input_lens` | what `quire bench serve` and `vllm bench serve` save with --save-result --save-detailed |
| .jsonl with `prompt` | vLLM's custom dataset: prompts as text or ids, without times |
| .json, a list | ShareGPT: conversations, without times |

Prompts of the last two are tokenized, and arrive as --request-rate says.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from quire.errors import ConfigError, reason
from quire.tools.bench.datasets import DatasetOptions, Sample, Tokens, make_samples
from quire.tools.bench.load import ArrivalOptions, arrival_times


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
        """This load with its gaps stretched to this rate on average. Without gaps, it gets those of a Poisson
        process."""
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


@dataclass(frozen=True)
class TraceFileOptions:
    """How a file is read."""

    trace: str | None = None
    """File of a load: BurstGPT's CSV, a JSON Lines trace with timestamps, the detailed result of a load generator, or a
    dataset of prompts."""
    trace_timestamps: Literal["ms", "s"] = "ms"
    """Unit of the timestamps in a JSON Lines trace: Mooncake's are milliseconds, Alibaba's are seconds."""
    trace_block_size: int = 512
    """Tokens that a hash id of such a trace stands for: 512 in Mooncake's, 16 in Alibaba's."""


def read_trace(
    options: TraceFileOptions, arrivals: ArrivalOptions, most: int, tokens: Callable[[], Tokens], rng: random.Random
) -> Trace:
    """The first `most` requests of the file, at their own times, or at those of --request-rate if it is finite.
    `tokens` returns the model's tokenizer, for files with text. Raises ConfigError if the file cannot be read or has
    something else in it."""
    path = options.trace
    assert path is not None
    try:
        requests = _burstgpt(path) if path.endswith(".csv") else _json_requests(options, path)
        if requests is None:
            dataset = DatasetOptions(dataset_path=path, num_prompts=most)
            samples = make_samples(dataset, tokens(), rng)
            requests = list(from_samples(samples, tokens(), arrival_times(arrivals, len(samples), rng), None).requests)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--trace {path} cannot be read: {reason(error)}.", param="trace") from error
    requests = [request for request in requests if request.prompt > 0 and request.output > 0]
    if not requests or any(not 0 <= request.arrival < math.inf for request in requests):
        raise ConfigError(f"--trace {path} has no requests with times, prompts and outputs.", param="trace")
    trace = from_requests(requests, most, arrivals.max_concurrency)
    return trace if math.isinf(arrivals.request_rate) else trace.at_rate(arrivals.request_rate)


def _burstgpt(path: str) -> list[TraceRequest]:
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        TraceRequest(float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"])) for row in rows
    ]


def _json_requests(options: TraceFileOptions, path: str) -> list[TraceRequest] | None:
    """The requests of a file with times; None if the file is a dataset."""
    text = Path(path).read_text()
    if path.endswith(".jsonl"):
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
        if not lines or "timestamp" not in lines[0]:
            return None
        return [_timed(options, line) for line in lines]
    found = json.loads(text)
    return _result(found) if isinstance(found, dict) and "input_lens" in found else None


def _timed(options: TraceFileOptions, line: Mapping[str, Any]) -> TraceRequest:
    """A request with hash ids, each of which is a block of tokens that prompts with the same ids before it share."""
    scale = 1e-3 if options.trace_timestamps == "ms" else 1.0
    prompt, size, ids = int(line["input_length"]), options.trace_block_size, line.get("hash_ids") or []
    parts = tuple((f"block {each}", min(size, prompt - at * size)) for at, each in enumerate(ids) if at * size < prompt)
    return TraceRequest(float(line["timestamp"]) * scale, prompt, int(line["output_length"]), parts)


def _result(found: Mapping[str, Any]) -> list[TraceRequest]:
    """The requests of a load generator's result; without start times, all of them come at once."""
    prompts: Sequence[int] = found["input_lens"]
    starts = found.get("start_times") or [0.0] * len(prompts)
    first = min(starts)
    triples = zip(starts, prompts, found["output_lens"], strict=True)
    return [TraceRequest(float(start) - first, int(prompt), int(output)) for start, prompt, output in triples]
