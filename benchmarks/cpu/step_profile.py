"""Where the time of a decode step goes on this machine's processor, kernel by kernel.

    python benchmarks/cpu/step_profile.py [--shape 0.5b|tiny] [--rows 1,16] [--context 192] [--int8]
        [--checkpoints DIR]

Steps run with --enforce-eager here, kernel by kernel, so that each can be timed; "recorded" is the same step as it is
served, replayed by one call. What is left of the whole step is Python's: shorter by far in a recorded one.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoints import config_of, make_checkpoint
from int8_checkpoint import make_int8_checkpoint

from quire import LLM, SamplingParams
from quire.compute.kernels.cpu.library import Library

_OUTPUTS = 33
"""Tokens of each request: one by the prompt's step, the others by decode steps."""


def main() -> None:
    arguments = _arguments()
    checkpoint = make_checkpoint(arguments.shape, arguments.checkpoints)
    settings = {}
    if arguments.int8:
        checkpoint, settings = make_int8_checkpoint(checkpoint), {"kv_cache_dtype": "int8"}
    print("| rows | kernel | calls | ms a step | share |\n| --- | --- | --- | --- | --- |")
    for rows in map(int, arguments.rows.split(",")):
        recorded, _ = _steps(checkpoint, rows, arguments.context, settings, enforce_eager=False)
        whole, kernels = _steps(checkpoint, rows, arguments.context, settings, enforce_eager=True)
        for name, (calls, seconds) in sorted(kernels.items(), key=lambda item: -item[1][1]):
            print(f"| {rows} | {name} | {calls:g} | {1e3 * seconds:.3f} | {seconds / whole:.1%} |")
        print(f"| {rows} | whole step | | {1e3 * whole:.3f} | |")
        print(f"| {rows} | the same, recorded | | {1e3 * recorded:.3f} | |", flush=True)


def _steps(
    checkpoint: Path, rows: int, context: int, settings: Mapping[str, Any], *, enforce_eager: bool
) -> tuple[float, dict[str, tuple[float, float]]]:
    """Seconds of a decode step, and of each of its kernels the calls and their seconds: the best of three runs."""
    settings = {"dtype": "bfloat16", "skip_tokenizer_init": True, "max_num_seqs": rows, **settings}
    with LLM(str(checkpoint), enforce_eager=enforce_eager, max_model_len=context + _OUTPUTS, **settings) as llm:
        vocabulary = config_of(checkpoint)["vocab_size"]
        runs = [_run(llm, rows, context, vocabulary) for _ in range(3)]
    return min(runs, key=lambda run: run[0])


def _run(llm: LLM, rows: int, context: int, vocabulary: int) -> tuple[float, dict[str, tuple[float, float]]]:
    prompts = [{"prompt_token_ids": [random.randrange(3, vocabulary) for _ in range(context)]} for _ in range(rows)]
    figures = []
    for outputs in (1, _OUTPUTS):
        params = SamplingParams(temperature=0.0, max_tokens=outputs, min_tokens=outputs, ignore_eos=True)
        with _timed() as (calls, seconds):
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            figures.append((time.perf_counter() - began, calls, seconds))
        llm.reset_prefix_cache()
    (first, first_calls, first_seconds), (whole, calls, seconds) = figures
    steps = _OUTPUTS - 1
    kernels = {n: ((calls[n] - first_calls[n]) / steps, (seconds[n] - first_seconds[n]) / steps) for n in calls}
    return (whole - first) / steps, kernels


@contextmanager
def _timed() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Within it, each kernel's calls are counted and timed, but not those of recorded steps."""
    calls: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    untimed = Library.__call__

    def timed(self: Library, name: str, dtype: Any, *arguments: Any) -> None:
        began = time.perf_counter()
        untimed(self, name, dtype, *arguments)
        seconds[name] += time.perf_counter() - began  # type: ignore[assignment]
        calls[name] += 1

    Library.__call__ = timed  # type: ignore[method-assign]
    try:
        yield calls, seconds
    finally:
        Library.__call__ = untimed  # type: ignore[method-assign]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5b", choices=("0.5b", "tiny"))
    parser.add_argument("--rows", default="1,16", help="requests at once")
    parser.add_argument("--context", type=int, default=192, help="tokens of each prompt")
    parser.add_argument("--int8", action="store_true", help="W8A8 with an int8 KV cache, as compare.py's")
    parser.add_argument("--checkpoints", type=Path, default=Path("~/.cache/quire/benchmarks/checkpoints").expanduser())
    return parser.parse_args()


if __name__ == "__main__":
    main()
