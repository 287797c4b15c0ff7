"""What speculation brings on a CPU: tokens a second of decode steps of one sequence of Quill.

    python benchmarks/speculation.py [--dtype bfloat16] [--drafts 4] [--prompts 6] [--json]

Questions of Quill's examination, by task, are answered one after the other, greedily, by an engine without drafts, one
with the draft model, one with the EAGLE-3 head and one with prompt lookup, in turns. Each step that samples is timed by
the processor time of the thread that computes (so give OMP_NUM_THREADS=1), or with --wall by the clock, drafting
included; prompts are left out. The task `repeat` asks by prompt lookup's best case: a text that goes on as it stands in
the prompt already.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "quill"))

from quill.examination import examination

from quire import LLM, SamplingParams
from quire.foundation.messages.workers import Plan, Result
from quire.runtime.worker.worker import Worker

TASKS = ("stories", "functions", "extraction")
PHRASE = "The red fox runs over the green hill and sees a small river. "


@dataclass
class Steps:
    """Decode steps of one engine and task."""

    seconds: float = 0.0
    tokens: int = 0
    number: int = 0
    drafted: int = 0


def timed(clock: Callable[[], float], now: list[Steps]) -> None:
    """Time every step of one row and at most 17 tokens, as `now[-1]`; steps of the draft model are within them."""
    execute, depth = Worker.execute, [0]

    def measured(self: Worker, plan: Plan, *others: Any) -> Result:
        depth[0] += 1
        began = clock()
        result = execute(self, plan, *others)
        spent = clock() - began
        depth[0] -= 1
        if not depth[0] and len(plan.sampled_rows) == 1 and sum(plan.counts) <= 17 and now:
            steps = now[-1]
            steps.seconds, steps.number = steps.seconds + spent, steps.number + 1
            steps.tokens, steps.drafted = steps.tokens + len(result.tokens), steps.drafted + sum(result.drafted)
        return result

    Worker.execute = measured  # type: ignore[method-assign, assignment]


def questions(number: int) -> dict[str, list[list[dict[str, str]]]]:
    """Conversations by task."""
    found = defaultdict(list)
    for sample in examination(40 * number):
        if sample.task in TASKS and len(found[sample.task]) < number:
            found[sample.task].append([{"role": each.role, "content": each.content} for each in sample.question])
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    now: list[Steps] = []
    timed(time.perf_counter if options.wall else time.thread_time, now)
    shared: dict[str, Any] = {
        "dtype": options.dtype, "max_model_len": 1024, "max_num_seqs": 4, "enable_prefix_caching": False,
    }  # fmt: skip
    engines = {
        "off": LLM("quill", **shared),
        "draft model": LLM(
            "quill", speculative_model="quill_draft", num_speculative_tokens=options.drafts, **shared
        ),
        "eagle3": LLM(
            "quill",
            speculative_config={"method": "eagle3", "model": "quill_eagle3", "num_speculative_tokens": options.drafts},
            **shared,
        ),
        "ngram": LLM(
            "quill", speculative_config={"method": "ngram", "num_speculative_tokens": options.drafts}, **shared
        ),
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=160)
    found: dict[str, dict[str, Steps]] = {}
    for task, conversations in questions(options.prompts).items():
        found[task] = {name: Steps() for name in engines}
        for conversation in conversations:
            for name, engine in engines.items():
                now.append(found[task][name])
                engine.chat([conversation], params, use_tqdm=False)
    found["repeat"] = {name: Steps() for name in engines}
    for name, engine in engines.items():
        now.append(found["repeat"][name])
        going_on = SamplingParams(temperature=0, max_tokens=160, ignore_eos=True)
        engine.generate([PHRASE * 8] * 1, going_on, use_tqdm=False)
    report(found, as_json=options.json)


def report(found: dict[str, dict[str, Steps]], *, as_json: bool) -> None:
    """Tokens a second by task and engine, beside those without drafts."""
    rows = []
    for task, engines in found.items():
        plain = engines["off"].tokens / engines["off"].seconds
        for name, steps in engines.items():
            rate = steps.tokens / steps.seconds
            accepted = (steps.tokens - steps.number) / steps.drafted if steps.drafted else 0.0
            rows.append({
                "task": task, "engine": name, "tokens_per_s": round(rate), "ratio": round(rate / plain, 2),
                "tokens_per_step": round(steps.tokens / steps.number, 2), "accepted": round(accepted, 2),
            })  # fmt: skip
    for row in rows:
        print(json.dumps(row) if as_json else "  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
