"""`quire bench serve`: load on a running server, of this project or any with OpenAI's API."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import msgspec
import uvloop

from quire.errors import ConfigError, QuireError, UnavailableError, reason
from quire.foundation.http_client.http1 import HttpError
from quire.foundation.http_client.pool import BlockingClient
from quire.models.weights import hub
from quire.text.tokenizer import load_tokenizer
from quire.tools.bench.client import ENDPOINTS, Backend, Connections, StreamingClient
from quire.tools.bench.datasets import (
    DatasetOptions,
    LocalTokens,
    Sample,
    ServedTokens,
    Tokens,
    has_tokenizer,
    make_samples,
)
from quire.tools.bench.load import ArrivalOptions, Load, arrival_times, run_load
from quire.tools.bench.report import progress
from quire.tools.bench.serving_figures import Run, ServingReportOptions, read_counters
from quire.tools.bench.serving_report import publish

CONNECT_S = 30.0
RETRY_S = 1.0


@dataclass(frozen=True)
class ServeOptions:
    """Which server, and what every request asks."""

    DESCRIPTION: ClassVar[str] = "Send requests to a running server and report latencies and throughput."

    base_url: str | None = None
    """Address of the server, without the API's path. Default: http://HOST:PORT."""
    host: str = "127.0.0.1"
    """Host of the server, where --base-url is not given."""
    port: int = 8000
    """Port of the server, where --base-url is not given."""
    backend: Backend = "openai"
    """API: openai and vllm are text completions, openai-chat is chat."""
    endpoint: str | None = None
    """Path of the API. Default: the backend's usual one."""
    model: str | None = None
    """Name of the model in requests. Default: the first one that the server serves."""
    tokenizer: str | None = None
    """Directory or hub id of a tokenizer. Default: the server's own, by /tokenize and /detokenize; where the server has
    none, random token ids below its vocabulary's size."""
    vocab_size: int | None = None
    """Draw random token ids below this, without any tokenizer."""
    api_key: str | None = None
    """API key, if the server asks for one."""
    header: tuple[str, ...] = ()
    """Headers of every request, as NAME=VALUE."""
    insecure: bool = False
    """Do not check the server's certificate."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Fields of every request, as JSON."""
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
    seed: int | None = None
    """Seed of prompts and arrivals. Default: a new one each time, so that no earlier run's prompts are cached."""
    num_warmups: int = 0
    """Requests before the measurement, with prompts of their own."""
    ready_check_timeout_sec: float = 0.0
    """Wait this long for the server to come up."""
    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    arrivals: ArrivalOptions = field(default_factory=ArrivalOptions)
    report: ServingReportOptions = field(default_factory=ServingReportOptions)

    @property
    def root(self) -> str:
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/")


@dataclass(frozen=True)
class _ServedModel:
    """What the server says about its model. The vocabulary's size is None if it does not say. A server without a
    tokenizer takes and returns token ids only."""

    name: str
    vocab_size: int | None
    has_tokenizer: bool


def run(options: ServeOptions) -> int:
    """Measure and report; returns the exit code: 1 if requests failed. Raises QuireError if nothing can be measured."""
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    rng = random.Random(seed)
    try:
        client = BlockingClient(
            options.root, _headers(options), connect_s=CONNECT_S, insecure=options.insecure, timeout_s=CONNECT_S
        )
    except ValueError as error:
        raise ConfigError(f"--base-url or --header cannot be used: {error}.", param="base_url") from error
    with client as http:
        model = _served_model(http, options)
        samples, warmups = _samples(options, http, model, rng)
        times = arrival_times(options.arrivals, len(samples), rng)
        before = read_counters(http)
        body = _body(options, model)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            load = runner.run(_measure(options, body, samples, warmups, times))
        counted = {name: value - before.get(name, 0.0) for name, value in read_counters(http).items()}
    publish(Run(options, options.report, model.name, seed, load, samples, counted))
    return 1 if len(load.completed) < len(samples) else 0


async def _measure(
    options: ServeOptions,
    body: dict[str, Any],
    samples: list[Sample],
    warmups: list[Sample],
    times: list[float],
) -> Load:
    async with Connections(options.root, CONNECT_S, _headers(options), insecure=options.insecure) as connections:
        client = StreamingClient(connections, options.endpoint or ENDPOINTS[options.backend], options.backend, body)
        if warmups:
            with progress("Warming up", len(warmups)) as advance:
                concurrency = options.arrivals.max_concurrency
                await run_load(client, warmups, [0.0] * len(warmups), concurrency, advance)
        with progress("Requests", len(samples)) as advance:
            return await run_load(client, samples, times, options.arrivals.max_concurrency, advance)


def _served_model(http: BlockingClient, options: ServeOptions) -> _ServedModel:
    deadline = time.monotonic() + options.ready_check_timeout_sec
    while True:
        try:
            if http.ask("GET", "/health")[0] == 503:
                raise ValueError("it is starting or draining: --ready-check-timeout-sec waits for it")
            status, content = http.ask("GET", "/v1/models")
            if status in (401, 403):
                raise QuireError(f"{options.root} asks for an API key: give --api-key.")
            if status != 200:
                raise ValueError(f"it answers {status}")
            card = msgspec.json.decode(content)["data"][0]
            name = options.model or str(card["id"])
            return _ServedModel(name, card.get("vocab_size"), has_tokenizer(http, name))
        except (HttpError, msgspec.DecodeError, ValueError, LookupError, TypeError, AttributeError) as error:
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"{options.root} does not answer as an OpenAI server ({reason(error)}). "
                    "Start one with 'quire serve', or give --base-url."
                ) from error
            time.sleep(RETRY_S)


def _samples(
    options: ServeOptions, http: BlockingClient, model: _ServedModel, rng: random.Random
) -> tuple[list[Sample], list[Sample]]:
    """The samples that are measured, and those that are sent before as a warm-up."""
    tokens: Tokens
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(hub.resolve(options.tokenizer, weights=False))
        tokens = LocalTokens(options.vocab_size or tokenizer.vocab_size, tokenizer)
    elif options.vocab_size is not None:
        tokens = LocalTokens(options.vocab_size)
    elif model.vocab_size is not None and not model.has_tokenizer:
        tokens = LocalTokens(model.vocab_size)
    else:
        tokens = ServedTokens(http, model.name)
    samples = make_samples(replace(options.dataset, num_prompts=_wanted(options)), tokens, rng)
    if options.backend == "openai-chat":
        samples = [_as_text(sample, tokens) for sample in samples]
    warmups = max(0, min(options.num_warmups, len(samples) - 1))
    return samples[warmups:], samples[:warmups]


def _wanted(options: ServeOptions) -> int:
    if options.dataset.num_prompts < 1 or options.num_warmups < 0:
        raise ConfigError("--num-prompts must be at least 1 and --num-warmups at least 0.", param="num_prompts")
    return options.dataset.num_prompts + options.num_warmups


def _as_text(sample: Sample, tokens: Tokens) -> Sample:
    if isinstance(sample.prompt, str):
        return sample
    return Sample(tokens.decode(sample.prompt), sample.output_len)


def _headers(options: ServeOptions) -> dict[str, str]:
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    for pair in options.header:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--header takes NAME=VALUE, got '{pair}'.", param="header")
        headers[name] = value
    return headers


def _body(options: ServeOptions, model: _ServedModel) -> dict[str, Any]:
    sampling = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    body = {"model": model.name} | {name: value for name, value in sampling.items() if value is not None}
    if not model.has_tokenizer:  # a stream without text has chunks only if they carry token ids
        body["return_token_ids"] = True
    if options.ignore_eos:
        body["ignore_eos"] = True
    return body | options.extra_body
