"""`quire bench serve`: load on a running server, of this project or any with OpenAI's API."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import uvloop

from quire.errors import ConfigError
from quire.foundation.http_client.pool import BlockingClient
from quire.tools.bench.client import (
    ENDPOINTS,
    GENERATING,
    RERANKING,
    Backend,
    Connections,
    PoolingClient,
    StreamingClient,
)
from quire.tools.bench.datasets import DatasetOptions, Sample, Tokens, batched, make_samples
from quire.tools.bench.load import ArrivalOptions, Load, arrival_times, run_load
from quire.tools.bench.report import progress
from quire.tools.bench.server import CONNECT_S, ServedModel, ServerOptions, prompt_tokens, served_model
from quire.tools.bench.serving_figures import Run, ServingReportOptions, read_counters
from quire.tools.bench.serving_report import publish

_TAKES_IDS: tuple[Backend, ...] = ("openai", "quire", "vllm", "openai-embeddings", "embeddings", "vllm-pooling")
"""Backends that take prompts as token ids."""


@dataclass(frozen=True)
class ServeOptions(ServerOptions):
    """Which server, and what every request asks."""

    DESCRIPTION: ClassVar[str] = "Send requests to a running server and report latencies and throughput."

    backend: Backend = "openai"
    """API: openai, quire and vllm are text completions, openai-chat is chat. openai-embeddings (or embeddings), its
    -chat form, vllm-pooling and vllm-rerank (or rerank) generate nothing."""
    endpoint: str | None = None
    """Path of the API. Default: the backend's usual one."""
    temperature: float = 0.0
    """Sampling; 0 is greedy."""
    top_p: float | None = None
    """Sampling."""
    top_k: int | None = None
    """Sampling."""
    min_p: float | None = None
    """Sampling."""
    ignore_eos: bool = False
    """Let every output reach its length."""
    num_warmups: int = 0
    """Requests before the measurement, with prompts of their own."""
    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    arrivals: ArrivalOptions = field(default_factory=ArrivalOptions)
    report: ServingReportOptions = field(default_factory=ServingReportOptions)


def run(options: ServeOptions) -> int:
    """Measure and report; returns the exit code: 1 if requests failed. Raises QuireError if nothing can be measured."""
    seed = options.drawn_seed
    rng = random.Random(seed)
    with options.connect() as http:
        model = served_model(http, options)
        samples, warmups = _samples(options, http, model, rng)
        times = arrival_times(options.arrivals, len(samples), rng)
        before = read_counters(http)
        body = _body(options, model)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            load = runner.run(_measure(options, body, samples, warmups, times))
        counted = {name: value - before.get(name, 0.0) for name, value in read_counters(http).items()}
    report = options.report if options.backend in GENERATING else replace(options.report, percentile_metrics="e2el")
    publish(Run(options, report, model.name, seed, load, samples, counted))
    return 1 if len(load.completed) < len(samples) else 0


async def _measure(
    options: ServeOptions,
    body: dict[str, Any],
    samples: list[Sample],
    warmups: list[Sample],
    times: list[float],
) -> Load:
    async with Connections(options.root, CONNECT_S, options.headers(), insecure=options.insecure) as connections:
        kind = StreamingClient if options.backend in GENERATING else PoolingClient
        client = kind(connections, options.endpoint or ENDPOINTS[options.backend], options.backend, body)
        if warmups:
            with progress("Warming up", len(warmups)) as advance:
                concurrency = options.arrivals.max_concurrency
                await run_load(client, warmups, [0.0] * len(warmups), concurrency, advance)
        with progress("Requests", len(samples)) as advance:
            return await run_load(client, samples, times, options.arrivals.max_concurrency, advance)


def _samples(
    options: ServeOptions, http: BlockingClient, model: ServedModel, rng: random.Random
) -> tuple[list[Sample], list[Sample]]:
    """The samples that are measured, and those that are sent before as a warm-up."""
    tokens = prompt_tokens(options, http, model)
    size = _texts_per_request(options)
    wanted, takes_images = (
        replace(options.dataset, num_prompts=_wanted(options) * size),
        options.backend == "openai-chat",
    )
    samples = make_samples(wanted, tokens, rng, takes_images=takes_images)
    if options.backend not in _TAKES_IDS:
        samples = [_as_text(sample, tokens) for sample in samples]
    samples = batched(samples, size)
    warmups = max(0, min(options.num_warmups, len(samples) - 1))
    return samples[warmups:], samples[:warmups]


def _texts_per_request(options: ServeOptions) -> int:
    size, backend = options.dataset.random_batch_size, options.backend
    if size < 1:
        raise ConfigError(f"--random-batch-size must be at least 1, got {size}.", param="random_batch_size")
    if size > 1 and backend in (*GENERATING, "openai-embeddings-chat"):
        raise ConfigError(f"--random-batch-size is not for --backend {backend}.", param="random_batch_size")
    return size + 1 if backend in RERANKING else size


def _wanted(options: ServeOptions) -> int:
    if options.dataset.num_prompts < 1 or options.num_warmups < 0:
        raise ConfigError("--num-prompts must be at least 1 and --num-warmups at least 0.", param="num_prompts")
    return options.dataset.num_prompts + options.num_warmups


def _as_text(sample: Sample, tokens: Tokens) -> Sample:
    if isinstance(sample.prompt, str):
        return sample
    return replace(sample, prompt=tokens.decode(sample.prompt))


def _body(options: ServeOptions, model: ServedModel) -> dict[str, Any]:
    if options.backend not in GENERATING:
        return {"model": model.name} | options.extra_body
    sampling = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    body = {"model": model.name} | {name: value for name, value in sampling.items() if value is not None}
    if not model.has_tokenizer:  # a stream without text has chunks only if they carry token ids
        body["return_token_ids"] = True
    if options.ignore_eos:
        body["ignore_eos"] = True
    return body | options.extra_body
