"""What a request costs the host before its first step is launched and after its last one is done, through `LLM`.

    python benchmarks/host_request.py [--tokens 50,512,2048,8192,32000] [--runs 21]

The device is a stub that draws token 7. Prompts are token ids, all different but for the last row's, which begin with
the same 2,000 tokens. Prints medians in milliseconds: from `generate` to the first plan handed over, and from the last
result to the output returned. Then the time between two steps of sequences that all draw a token a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path

import quire.llm
from quire import LLM, SamplingParams
from quire.messages import Plan, Result, Sizing

LONGEST = 40_000
VOCABULARY = 32_000
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LONGEST,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SHARED, OWN = 2_000, 50


class StubExecutor:
    """Draws token 7 at once; knows when it was handed plans and gave results."""

    max_in_flight = 2

    def __init__(self) -> None:
        self._plans: deque[Plan] = deque()
        self.submitted: list[float] = []
        self.collected = 0.0

    def start(self) -> Sizing:
        return Sizing(num_blocks=LONGEST, vocab_size=VOCABULARY)

    def submit(self, plan: Plan) -> None:
        self.submitted.append(time.perf_counter())
        self._plans.append(plan)

    def collect(self, timeout: float | None) -> Result:
        plan = self._plans.popleft()
        self.collected = time.perf_counter()
        return Result(plan.step, [1] * len(plan.reads), [7] * len(plan.reads))

    def close(self) -> None:
        pass


class Bench:
    """An LLM on a stub."""

    def __init__(self) -> None:
        self._stub, self._random = StubExecutor(), random.Random(0)
        quire.llm.executor_for = lambda config, clock: self._stub  # type: ignore[assignment]
        directory = Path(tempfile.mkdtemp())
        (directory / "config.json").write_text(json.dumps(MODEL))
        self._llm = LLM(
            str(directory), device="cpu", load_format="dummy", skip_tokenizer_init=True, max_num_seqs=256,
            max_num_batched_tokens=8_192, num_gpu_blocks_override=LONGEST,
        )  # fmt: skip

    def request(self, prompts: list[list[int]]) -> tuple[float, float]:
        """Milliseconds before the first step and after the last, for one prompt after another."""
        params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0, detokenize=False)
        before, after = [], []
        for prompt in prompts:
            self._stub.submitted.clear()
            began = time.perf_counter()
            self._llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            after.append(time.perf_counter() - self._stub.collected)
            before.append(self._stub.submitted[0] - began)
        return statistics.median(before) * 1e3, statistics.median(after) * 1e3

    def step(self, sequences: int, steps: int = 200) -> float:
        """Milliseconds between two steps."""
        params = SamplingParams(max_tokens=steps, ignore_eos=True, temperature=0.0, detokenize=False)
        self._stub.submitted.clear()
        prompts = [{"prompt_token_ids": self.prompt(64)} for _ in range(sequences)]
        self._llm.generate(prompts, params, use_tqdm=False)
        times = self._stub.submitted[10:-10]
        return statistics.median(b - a for a, b in itertools.pairwise(times)) * 1e3

    def prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(tokens)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="50,512,2048,8192,32000")
    parser.add_argument("--runs", type=int, default=21)
    arguments = parser.parse_args()
    bench, runs = Bench(), arguments.runs
    rows = {f"{n:,} tokens": [bench.prompt(n) for _ in range(runs)] for n in map(int, arguments.tokens.split(","))}
    shared = bench.prompt(SHARED)
    rows[f"{SHARED:,} cached + {OWN}"] = [shared + bench.prompt(OWN) for _ in range(runs)]
    for name, prompts in rows.items():
        before, after = bench.request(prompts)
        print(f"{name:20} before {before:.3f}  after {after:.3f}")
    for sequences in (1, 32, 256):
        print(f"{sequences:3} sequences        step {min(bench.step(sequences) for _ in range(3)):.3f}")


if __name__ == "__main__":
    main()
