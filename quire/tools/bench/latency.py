"""`quire bench latency`: one batch at a time through an engine in this process, again and again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.offline.prompts import Prompt
from quire.sampling_params import SamplingParams
from quire.tools.bench.offline_engine import OfflineEngine, start_engine
from quire.tools.bench.progress import progress
from quire.tools.bench.report import measured_with, table, write_json
from quire.tools.bench.summary import percentile_name, summarize

DESCRIPTION = "Measure how long a batch takes, from prompts to the last token. Each iteration has new random prompts."
PERCENTILES = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)


@dataclass(frozen=True)
class LatencyOptions:
    """The batch, and how often."""

    input_len: int = 32
    """Tokens a prompt."""
    output_len: int = 128
    """Tokens an output."""
    batch_size: int = 8
    """Prompts in the batch."""
    n: int = 1
    """Sequences for each prompt."""
    num_iters_warmup: int = 10
    """Iterations before the measurement."""
    num_iters: int = 30
    """Iterations that are measured."""
    disable_detokenize: bool = False
    """Do not turn tokens into text."""
    output_json: str | None = None
    """Write the result to this file."""


def run(options: LatencyOptions, config: Config) -> int:
    """Measure and report; the exit code.

    Raises:
        QuireError: Options that cannot be meant, or a model that cannot be served.
    """
    for name in ("input_len", "output_len", "batch_size", "n", "num_iters"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1.", param=name)
    engine = start_engine(config)
    with engine.llm:
        once = _iteration(options, engine, random.Random(config.model.seed))
        with progress("Warming up", options.num_iters_warmup) as advance:
            for _ in range(options.num_iters_warmup):
                once()
                advance()
        latencies = []
        with progress("Iterations", options.num_iters) as advance:
            for _ in range(options.num_iters):
                latencies.append(once())
                advance()
    _publish(options, engine, latencies)
    return 0


def _iteration(options: LatencyOptions, engine: OfflineEngine, rng: random.Random) -> Callable[[], float]:
    """A function that runs one batch of prompts nobody has seen and returns its seconds."""
    text = not (options.disable_detokenize or engine.config.model.skip_tokenizer_init)
    params = SamplingParams(
        n=options.n, temperature=1.0, ignore_eos=True, max_tokens=options.output_len, detokenize=text
    )

    def once() -> float:
        prompts: list[Prompt] = [engine.tokens.random_ids(options.input_len, rng) for _ in range(options.batch_size)]
        began = time.perf_counter()
        engine.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    return once


def _publish(options: LatencyOptions, engine: OfflineEngine, latencies: list[float]) -> None:
    summary = summarize(latencies, PERCENTILES)
    result: dict[str, Any] = {
        **measured_with(options, engine.config),
        "avg_latency": summary.mean,
        "std_latency": summary.std,
        "ci95_latency": summary.ci95,
        "latencies": latencies,
        "percentiles": {f"{wanted:g}": value for wanted, value in summary.percentiles.items()},
    }
    rows = [("Mean (± 95% confidence)", f"{summary.mean:.4f} ± {summary.ci95:.4f}")]
    rows += [(percentile_name(wanted).upper(), f"{value:.4f}") for wanted, value in summary.percentiles.items()]
    print(table("Latency benchmark result, seconds", [("", rows)]))
    print(f"Avg latency: {summary.mean} seconds")
    if options.output_json is not None:
        write_json(options.output_json, result)
