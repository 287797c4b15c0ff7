"""`quire bench throughput`: all prompts at once through an engine in this process."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.offline.prompts import Prompt
from quire.sampling_params import SamplingParams
from quire.tools.bench.datasets import DatasetOptions, Sample, make_samples
from quire.tools.bench.offline_engine import OfflineEngine, start_engine
from quire.tools.bench.report import measured_with, table, write_json

DESCRIPTION = "Measure the throughput of an engine in this process. --seed is the dataset's as well."


@dataclass(frozen=True)
class ThroughputOptions:
    """What is generated, and where the result goes."""

    n: int = 1
    """Sequences for each prompt."""
    disable_detokenize: bool = False
    """Do not turn tokens into text."""
    output_json: str | None = None
    """Write the result to this file."""
    dataset: DatasetOptions = field(default_factory=DatasetOptions)


def run(options: ThroughputOptions, config: Config) -> int:
    """Measure and report; the exit code.

    Raises:
        QuireError: Options that cannot be meant, or a model that cannot be served.
    """
    if options.n < 1:
        raise ConfigError(f"--n must be at least 1, got {options.n}.", param="n")
    engine = start_engine(config)
    with engine.llm as llm:
        samples = make_samples(options.dataset, engine.tokens, random.Random(config.model.seed))
        params = [_params(options, config, sample.output_len) for sample in samples]
        prompts: list[Prompt] = [sample.prompt for sample in samples]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params)
        elapsed = time.perf_counter() - began
    inputs = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    _publish(options, engine, samples, elapsed, (inputs, generated))
    return 0


def _params(options: ThroughputOptions, config: Config, length: int) -> SamplingParams:
    text = not (options.disable_detokenize or config.model.skip_tokenizer_init)
    return SamplingParams(n=options.n, temperature=1.0, ignore_eos=True, max_tokens=length, detokenize=text)


def _publish(
    options: ThroughputOptions, engine: OfflineEngine, samples: list[Sample], elapsed: float, tokens: tuple[int, int]
) -> None:
    """Print, and write the file that was asked for.

    Args:
        tokens: Of prompts and of outputs.
    """
    inputs, generated = tokens
    total = inputs + generated
    result: dict[str, Any] = {
        **measured_with(options, engine.config),
        "elapsed_time": elapsed,
        "num_requests": len(samples),
        "total_input_tokens": inputs,
        "total_output_tokens": generated,
        "total_num_tokens": total,
        "requests_per_second": len(samples) / elapsed,
        "tokens_per_second": total / elapsed,
        "output_tokens_per_second": generated / elapsed,
    }
    rows = [
        ("Prompts", f"{len(samples)}"),
        ("Duration (s)", f"{elapsed:.2f}"),
        ("Input tokens", f"{inputs}"),
        ("Output tokens", f"{generated}"),
    ]
    print(table("Throughput benchmark result", [("", rows)]))
    print(
        f"Throughput: {len(samples) / elapsed:.2f} requests/s, {total / elapsed:.2f} total tokens/s, "
        f"{generated / elapsed:.2f} output tokens/s"
    )
    if options.output_json is not None:
        write_json(options.output_json, result)
