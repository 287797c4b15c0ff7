"""The rows of one model that need no server, all in this process; started by targets.py, one JSON line a result.

    python offline.py --model DIR [--rows REGEX] [--runs N] [--budget-s S] [--profile] [--set NAME=VALUE]

Random weights. A line is a row ({"row", "value", "runs"}), a profile ({"profile", "lines"}) or a remark ({"note"}).
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from serving import vocabulary
from step_profile import KernelTimes, decode_profile, first_token_profile, of_this_process
from workloads import Prompt, Workload, Workloads

from quire import LLM, SamplingParams
from quire.runtime.executor.multi_rank_executor import MultiRankExecutor


class Engine:
    """The engine that is measured, as a `Generate`."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        self._llm = LLM(model, **{"load_format": "dummy", "skip_tokenizer_init": True, **settings})

    def __call__(self, prompts: Sequence[Prompt], outputs: Sequence[int], **sampling: Any) -> float:
        how = sampling or {"temperature": 0.0}
        params = [SamplingParams(max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False, **how) for n in outputs]
        wanted = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        results = self._llm.generate(wanted, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        drawn = [len(result.outputs[0].token_ids) for result in results]
        if drawn != list(outputs):
            raise RuntimeError(f"Outputs have other lengths than asked for: {drawn[:8]} …, not {outputs[:8]} …")
        return seconds

    def profiled(self, run: Callable[[], object]) -> Sequence[KernelTimes]:
        """What kernels take while `run` generates, by rank."""
        executor = self._llm._engine._core._executor
        if isinstance(executor, MultiRankExecutor):
            return [dict(each) for each in executor.profile_kernels(run)]
        return of_this_process(run)


def emit(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def measure(workload: Workload, runs: int, deadline: float) -> None:
    """Emit its rows, or that there was no time; at least once if there is time for that."""
    seconds = workload.cost_s / workload.repeats
    values: dict[str, list[float]] = defaultdict(list)
    for number in range(runs * workload.repeats):
        if time.perf_counter() + seconds > deadline:
            emit(note=f"{workload.rows[0]}: no time left for run {number + 1} of {runs * workload.repeats}")
            break
        began = time.perf_counter()
        for row, value in workload.measure().items():
            values[row].append(value)
        seconds = time.perf_counter() - began
    for row, found in values.items():
        emit(row=row, value=workload.figure(found), runs=found)


def profile(row: str, workloads: Workloads, engine: Engine) -> None:
    """Emit where the time of a decode or first-token row goes."""
    if match := re.fullmatch(r"decode b=(\d+)", row):
        emit(profile=row, lines=decode_profile(engine, engine.profiled, workloads, int(match[1])))
    elif match := re.fullmatch(r"first token, ([\d,]+) in", row):
        emit(profile=row, lines=first_token_profile(engine, engine.profiled, workloads, int(match[1].replace(",", ""))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", default="")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--budget-s", type=float, default=3_600)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    if arguments.profile and not torch.cuda.is_available():
        parser.error("--profile shows the kernels of a GPU, and torch finds none here")
    settings = dict(map(setting, arguments.set))
    deadline = time.perf_counter() + arguments.budget_s
    engine = Engine(arguments.model, settings)
    workloads = Workloads(engine, vocabulary(Path(arguments.model)), seed=time.time_ns())
    workloads.warm_up()
    chosen = [w for w in workloads.all() if any(re.search(arguments.rows, row) for row in w.rows)]
    for workload in chosen:
        measure(workload, arguments.runs, deadline)
    if arguments.profile:
        for workload in chosen:
            profile(workload.rows[0], workloads, engine)


def setting(pair: str) -> tuple[str, Any]:
    """Parse `name=value`; the value is JSON where it can be parsed as such."""
    name, _, text = pair.partition("=")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text


if __name__ == "__main__":
    main()
