"""`quire bench throughput` and `quire bench latency`: how fast an engine in this process is. Loads torch."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

from quire.foundation.config import Config
from quire.foundation.config.values import check_range
from quire.offline.llm import LLM
from quire.offline.prompts import Prompt
from quire.planning.auto_config import resolve
from quire.sampling_params import SamplingParams
from quire.tools.bench.datasets import DatasetOptions, LocalTokens, make_samples
from quire.tools.bench.report import measured_with, percentile_name, progress, summarize, table, write_json

PERCENTILES = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)


@dataclass(frozen=True)
class ThroughputOptions:
    """What is generated, and where the result goes."""

    DESCRIPTION: ClassVar[str] = "Measure the throughput of an engine in this process. --seed is the dataset's as well."

    n: int = 1
    """Sequences for each prompt."""
    disable_detokenize: bool = False
    """Do not turn tokens into text."""
    output_json: str | None = None
    """Write the result to this file."""
    dataset: DatasetOptions = field(default_factory=DatasetOptions)


@dataclass(frozen=True)
class LatencyOptions:
    """The batch, and how often."""

    DESCRIPTION: ClassVar[str] = (
        "Measure how long a batch takes, from prompts to the last token. Each iteration has new random prompts."
    )

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


class OfflineBenchmark:
    """An engine that is measured, as a context `llm`, and its requests' parameters. `tokens` draws ids of the whole
    vocabulary, and has texts unless there is no tokenizer. Raises SetupError if the model cannot be served."""

    def __init__(self, options: ThroughputOptions | LatencyOptions, config: Config) -> None:
        self._options = options
        resolved = resolve(config)
        for reason in resolved.reasons:
            print(f"  {reason}", file=sys.stderr)
        self.llm = LLM(**config.changes())
        self._config, self._has_text = resolved.config, not resolved.config.model.skip_tokenizer_init
        tokenizer = self.llm.get_tokenizer() if self._has_text else None
        self.tokens = LocalTokens(resolved.spec.vocab_size, tokenizer)

    def params(self, output_len: int) -> SamplingParams:
        """Parameters for outputs of exactly this length."""
        text = self._has_text and not self._options.disable_detokenize
        return SamplingParams(
            n=self._options.n, temperature=1.0, ignore_eos=True, max_tokens=output_len, detokenize=text
        )

    def write(self, result: dict[str, Any]) -> None:
        """Write the result to --output-json, if that was given."""
        if self._options.output_json is not None:
            write_json(self._options.output_json, measured_with(self._options, self._config) | result)


def run_throughput(options: ThroughputOptions, config: Config) -> int:
    """Send all prompts at once, and report; returns the exit code. Raises QuireError for wrong options or models."""
    check_range(options, 1, None, "n")
    bench = OfflineBenchmark(options, config)
    with bench.llm:
        samples = make_samples(options.dataset, bench.tokens, random.Random(config.model.seed))
        params = [bench.params(sample.output_len) for sample in samples]
        prompts: list[Prompt] = [sample.prompt for sample in samples]
        began = time.perf_counter()
        outputs = bench.llm.generate(prompts, params)
        elapsed = time.perf_counter() - began
    inputs = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    rates = [number / elapsed for number in (len(samples), inputs + generated, generated)]
    rows = [
        ("Prompts", f"{len(samples)}"),
        ("Duration (s)", f"{elapsed:.2f}"),
        ("Input tokens", f"{inputs}"),
        ("Output tokens", f"{generated}"),
    ]
    print(table("Throughput benchmark result", [("", rows)]))
    print(f"Throughput: {rates[0]:.2f} requests/s, {rates[1]:.2f} total tokens/s, {rates[2]:.2f} output tokens/s")
    bench.write({
        "elapsed_time": elapsed,
        "num_requests": len(samples),
        "total_input_tokens": inputs,
        "total_output_tokens": generated,
        "total_num_tokens": inputs + generated,
        "requests_per_second": rates[0],
        "tokens_per_second": rates[1],
        "output_tokens_per_second": rates[2],
    })  # fmt: skip
    return 0


def run_latency(options: LatencyOptions, config: Config) -> int:
    """Send batch after batch, and report; returns the exit code. Raises QuireError for wrong options or models."""
    check_range(options, 1, None, "input_len", "output_len", "batch_size", "n", "num_iters")
    bench = OfflineBenchmark(options, config)
    with bench.llm:
        rng = random.Random(config.model.seed)
        _repeated("Warming up", options.num_iters_warmup, options, bench, rng)
        latencies = _repeated("Iterations", options.num_iters, options, bench, rng)
    summary = summarize(latencies, PERCENTILES)
    rows = [("Mean (± 95% confidence)", f"{summary.mean:.4f} ± {summary.ci95:.4f}")]
    rows += [(percentile_name(wanted).upper(), f"{value:.4f}") for wanted, value in summary.percentiles.items()]
    print(table("Latency benchmark result, seconds", [("", rows)]))
    print(f"Avg latency: {summary.mean} seconds")
    bench.write({
        "avg_latency": summary.mean,
        "std_latency": summary.std,
        "ci95_latency": summary.ci95,
        "latencies": latencies,
        "percentiles": {f"{wanted:g}": value for wanted, value in summary.percentiles.items()},
    })  # fmt: skip
    return 0


def _repeated(
    title: str, times: int, options: LatencyOptions, bench: OfflineBenchmark, rng: random.Random
) -> list[float]:
    """Run batches of new random prompts; returns the seconds of each."""
    latencies, params = [], bench.params(options.output_len)
    with progress(title, times) as advance:
        for _ in range(times):
            prompts: list[Prompt] = [bench.tokens.random_ids(options.input_len, rng) for _ in range(options.batch_size)]
            began = time.perf_counter()
            bench.llm.generate(prompts, params, use_tqdm=False)
            latencies.append(time.perf_counter() - began)
            advance()
    return latencies
