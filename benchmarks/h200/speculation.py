"""What speculation brings on a GPU: tokens a second with drafts and without, in turns, by the wall clock.

    python benchmarks/h200/speculation.py --model DIRECTORY [--rows 1,32,256] [--tokens 256]
    python benchmarks/h200/speculation.py --quill [--prompts 6] [--drafts 4]
    python benchmarks/h200/speculation.py --forced [--rows 1,4,16,64,256]
    python benchmarks/h200/speculation.py --copy [--shape large]

The first form makes a model of dummy weights and an engine without drafts beside one with prompt lookup. Prompts are
random tokens. Drawn at temperature 1, outputs are too, so next to nothing can be looked up: what counts is that nothing
is lost; the same greedily. The second form answers questions of Quill's examination one by one, greedily, and goes on
with a text that repeats itself; its engines have no drafts, the draft model, the EAGLE-3 head, or prompt lookup. The
third form is `benchmarks/forced_speculation.py` with the shapes of Llama-3.1-8B and Llama-3.2-1B: drafts that are
accepted at given rates, and steps beside the cost model's. The fourth is `benchmarks/copying.py` with a larger shape.
Rates of the first two include prompts, but for those of decode. One line of JSON a figure; ratios are of medians over
the repeats, after one that is not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from copying import arguments as copy_arguments
from copying import compare as compare_copies
from forced_speculation import arguments, forced_llama
from speculation import PHRASE, questions

from quire import LLM, SamplingParams
from quire.engine.metrics.reader import Counter, Histogram

BLOCK = 16


class Counted(NamedTuple):
    """What an engine has counted since its start.

    Attributes:
        drafts, accepted: Tokens.
        decode_s: From first tokens to the ends of requests.
        requests: That have ended.
    """

    drafts: float
    accepted: float
    decode_s: float
    requests: float

    @classmethod
    def of(cls, llm: LLM) -> Counted:
        """Its metrics."""
        found = {each.name: each for each in llm.get_metrics()}

        def counter(name: str) -> float:
            metric = found.get(f"vllm:spec_decode_num_{name}_tokens")
            return metric.value if isinstance(metric, Counter) else 0.0

        decode = found["vllm:request_decode_time_seconds"]
        assert isinstance(decode, Histogram)
        return cls(counter("draft"), counter("accepted"), decode.sum, decode.count)

    def since(self, before: Counted) -> Counted:
        """The difference."""
        return Counted(*(now - then for now, then in zip(self, before, strict=True)))


class Turns:
    """What one engine did in one case.

    Attributes:
        tokens: Of outputs, in each turn.
        seconds, decode_s: Of each turn that counts; the second without prompts and first tokens.
        drafts, accepted: In all turns.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.tokens = self.decoded = 0
        self.seconds: list[float] = []
        self.decode_s: list[float] = []
        self.drafts = self.accepted = 0.0

    def run(self, run: Callable[[LLM], int], *, counts: bool) -> None:
        """One turn."""
        before, began = Counted.of(self._llm), time.perf_counter()
        self.tokens = run(self._llm)
        seconds, counted = time.perf_counter() - began, Counted.of(self._llm).since(before)
        self.decoded = self.tokens - int(counted.requests)
        self.drafts += counted.drafts
        self.accepted += counted.accepted
        if counts:
            self.seconds.append(seconds)
            self.decode_s.append(counted.decode_s)

    @property
    def rates(self) -> tuple[float, float]:
        """Tokens a second, with prompts and without, by the medians."""
        return self.tokens / statistics.median(self.seconds), self.decoded / statistics.median(self.decode_s)


def compare(name: str, engines: dict[str, LLM], run: Callable[[LLM], int], repeats: int) -> dict[str, Turns]:
    """Run each engine in turns and say how fast it was. `run` returns output tokens."""
    turns = {each: Turns(llm) for each, llm in engines.items()}
    for turn in range(1 + repeats):
        for each in turns.values():
            each.run(run, counts=turn > 0)
    report(name, {engine: each.rates for engine, each in turns.items()}, {
        engine: {
            "drafts": int(each.drafts), "accepted": round(each.accepted / each.drafts, 2) if each.drafts else None,
            "spread": round(max(each.decode_s) / min(each.decode_s), 3),
        }
        for engine, each in turns.items()
    })  # fmt: skip
    return turns


def report(name: str, rates: dict[str, tuple[float, float]], more: dict[str, dict[str, Any]]) -> None:
    """A line of JSON for each engine."""
    for engine, (rate, decode_rate) in rates.items():
        print(json.dumps({
            "case": name, "engine": engine, "tokens_per_s": round(rate, 1), "ratio": round(rate / rates["off"][0], 3),
            "decode_tokens_per_s": round(decode_rate, 1), "decode_ratio": round(decode_rate / rates["off"][1], 3),
            **more.get(engine, {}),
        }), flush=True)  # fmt: skip


def of_all(cases: Sequence[dict[str, Turns]]) -> dict[str, tuple[float, float]]:
    """Tokens a second over several cases, by engine: all tokens by the sum of the medians."""
    return {
        engine: (
            sum(case[engine].tokens for case in cases) / sum(statistics.median(case[engine].seconds) for case in cases),
            sum(case[engine].decoded for case in cases)
            / sum(statistics.median(case[engine].decode_s) for case in cases),
        )
        for engine in cases[0]
    }


def of_dummy_weights(options: argparse.Namespace) -> None:
    rows = [int(each) for each in options.rows.split(",")]
    blocks = max(rows) * ((options.prompt + options.tokens) // BLOCK + 3)
    shared: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": max(rows),
        "max_model_len": min(2048, blocks * BLOCK), "num_gpu_blocks_override": blocks, "disable_log_stats": False,
        "swap_space": 0, "enable_prefix_caching": False,
    }  # fmt: skip
    lookup = {"method": "ngram", "num_speculative_tokens": options.drafts}
    engines = {"off": LLM(options.model, **shared), "ngram": LLM(options.model, speculative_config=lookup, **shared)}
    rng = random.Random(0)
    for number, greedy in [(number, greedy) for greedy in (False, True) for number in rows]:
        prompts: list[Any] = [
            {"prompt_token_ids": [rng.randrange(1_000, 100_000) for _ in range(options.prompt)]} for _ in range(number)
        ]
        params = SamplingParams(
            temperature=0.0 if greedy else 1.0, seed=1, max_tokens=options.tokens, ignore_eos=True,
            detokenize=False,
        )  # fmt: skip

        def run(llm: LLM, prompts: Any = prompts, params: SamplingParams = params) -> int:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return sum(len(each.outputs[0].token_ids) for each in outputs)

        kind = "greedy" if greedy else "random text"
        compare(f"{Path(options.model).name}, b={number}, {kind}", engines, run, options.repeats)


def of_quill(options: argparse.Namespace) -> None:
    shared: dict[str, Any] = {
        "dtype": options.dtype, "max_model_len": 1024, "max_num_seqs": 8, "enable_prefix_caching": False,
        "disable_log_stats": False, "num_gpu_blocks_override": 600, "swap_space": 0,
    }  # fmt: skip
    lookup = {"method": "ngram", "num_speculative_tokens": options.drafts}
    head = {"method": "eagle3", "model": "quill_eagle3", "num_speculative_tokens": options.drafts}
    engines = {
        "off": LLM("quill", **shared),
        "draft model": LLM("quill", speculative_model="quill_draft", num_speculative_tokens=options.drafts, **shared),
        "eagle3": LLM("quill", speculative_config=head, **shared),
        "ngram": LLM("quill", speculative_config=lookup, **shared),
    }
    params = SamplingParams(temperature=0, max_tokens=160)

    def of(outputs: Any) -> int:
        return sum(len(each.outputs[0].token_ids) for each in outputs)

    cases = [
        compare(
            f"quill, {task}", engines,
            lambda llm, own=conversations: sum(of(llm.chat([each], params, use_tqdm=False)) for each in own),
            options.repeats,
        )
        for task, conversations in questions(options.prompts).items()
    ]  # fmt: skip
    report("quill, all of them", of_all(cases), {})
    going_on = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    compare("quill, repeat", engines, lambda llm: of(llm.generate([PHRASE * 8], going_on, use_tqdm=False)), 5)


def main() -> None:
    if "--copy" in sys.argv:
        copying = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        copying.add_argument("--copy", action="store_true", required=True)
        copy_arguments(copying, shape="large")
        for figure in compare_copies(copying.parse_args()):
            print(json.dumps(figure), flush=True)
        return
    if "--forced" in sys.argv:
        forced = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        forced.add_argument("--forced", action="store_true", required=True)
        arguments(forced, rows=[1, 4, 16, 64, 256], step_rows=[1, 4, 16, 64, 256], repeats=2)
        forced_llama(forced.parse_args())
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--quill", action="store_true")
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    if options.quill:
        of_quill(options)
    else:
        of_dummy_weights(options)


if __name__ == "__main__":
    main()
