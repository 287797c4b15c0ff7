"""What a request costs the host before its first step is launched and after its last one is done, through `LLM`.

    python benchmarks/host_request.py [--tokens 50,512,2048,8192,32000] [--runs 21] [--cold]

The device is a stub that samples token 7. Prompts are token ids, all different, except that those of the last row share
their first 2,000 tokens. Prints medians in milliseconds: from `generate` to the first plan submitted, and from the last
result to the output returned. Then the time between two steps of sequences that sample a token in each step.

With --cold, what a request costs an idle engine: the CPU's caches are evicted before each request, and the worker's
host side launches each plan as a captured step whose CUDA graph does nothing; "launch" is the time of that.
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

import numpy as np
import torch
from torch import Tensor

import quire.offline.local_engine
from quire import LLM, SamplingParams
from quire.compute.attention import metadata_builder
from quire.compute.attention.limits import PaddedLimits
from quire.compute.attention.metadata import AttentionMetadata, IntArray
from quire.foundation.messages.workers import DeviceLimits, Plan, Result
from quire.planning.step_limits import StepLimits
from quire.runtime.executor.executor import NoOrders
from quire.runtime.worker.graph_shapes import GraphShapes
from quire.runtime.worker.kv_transfer import CpuBlockTransfer
from quire.runtime.worker.model_runner import ModelRunner
from quire.runtime.worker.replay import CudaGraphs
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.step import Step

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
ROWS, STEP, RECORDED = 256, 8_192, 512
SWEPT_BYTES = 64 * 2**20
SLEEP_S = 0.02


class StubModel:
    """Has no layers."""

    has_logits = True


class StubAttention:
    """The metadata of attention on a GPU."""

    _tiling = metadata_builder.PrefillTiling(64)

    def build_metadata(
        self, counts: IntArray, bounds: IntArray, limits: PaddedLimits | None = None
    ) -> AttentionMetadata:
        assert limits is not None, "only prompts in a recorded step"
        return metadata_builder.build_metadata(counts, bounds, self._tiling, limits)


class StubGraphs(CudaGraphs):
    """Graphs that do nothing."""

    def replay(self, step: Step) -> Tensor:
        step.staged.copy_by_replay()
        return torch.empty(0)


class ReplayingModelRunner(ModelRunner):
    """A worker's host side, whose small steps count as captured."""

    def __init__(self) -> None:
        cpu = torch.device("cpu")
        blocks = torch.zeros(1)
        slots = SlotTable(ROWS, LONGEST // 16, 1, VOCABULARY, cpu)
        largest = StepLimits(ROWS, STEP, LONGEST)
        super().__init__(StubModel(), StubAttention(), CpuBlockTransfer(blocks, blocks), slots, largest)  # type: ignore[arg-type]
        self._replayable = graphs = StubGraphs()
        graphs.shapes = GraphShapes(RECORDED, ROWS, STEP, LONGEST)


class StubExecutor:
    """Samples token 7 at once; notes when plans were submitted and results returned."""

    max_in_flight = 2
    orders = NoOrders()

    def __init__(self, runner: ModelRunner | None) -> None:
        self._plans: deque[Plan] = deque()
        self._runner = runner
        self.submitted: list[float] = []
        self.launches: list[float] = []
        self.collected = 0.0

    def start(self) -> DeviceLimits:
        return DeviceLimits(num_blocks=LONGEST, vocab_size=VOCABULARY)

    def check(self) -> None:
        """It never breaks."""

    def submit(self, plan: Plan) -> None:
        self.submitted.append(time.perf_counter())
        if self._runner is not None and sum(plan.counts) <= RECORDED:
            self._runner.launch(plan)
            self.launches.append(time.perf_counter() - self.submitted[-1])
        self._plans.append(plan)

    def collect(self, timeout: float | None) -> Result:
        plan = self._plans.popleft()
        self.collected = time.perf_counter()
        return Result(plan.step, [1] * len(plan.sampled_rows), [7] * len(plan.sampled_rows))

    def close(self) -> None:
        pass


class Bench:
    """An LLM on a stub."""

    def __init__(self, cold: bool) -> None:
        self._stub, self._random = StubExecutor(ReplayingModelRunner() if cold else None), random.Random(0)
        self._swept = np.zeros(SWEPT_BYTES if cold else 0, dtype=np.uint8)
        quire.offline.local_engine.build_executor = lambda config, clock: self._stub  # type: ignore[assignment]
        directory = Path(tempfile.mkdtemp())
        (directory / "config.json").write_text(json.dumps(MODEL))
        self._llm = LLM(
            str(directory), device="cpu", load_format="dummy", skip_tokenizer_init=True, max_num_seqs=ROWS,
            max_num_batched_tokens=STEP, num_gpu_blocks_override=LONGEST,
        )  # fmt: skip

    def request(self, prompts: list[list[int]]) -> dict[str, float]:
        """Milliseconds before the first step, in its launch and after the last, for one prompt after another."""
        params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0, detokenize=False)
        before, after = [], []
        self._stub.launches.clear()
        for prompt in prompts:
            self._stub.submitted.clear()
            if len(self._swept):
                self._swept += 1
                time.sleep(SLEEP_S)
            began = time.perf_counter()
            self._llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            after.append(time.perf_counter() - self._stub.collected)
            before.append(self._stub.submitted[0] - began)
        times = {"before": before, "launch": self._stub.launches, "after": after}
        return {name: statistics.median(found) * 1e3 for name, found in times.items() if found}

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
    parser.add_argument("--cold", action="store_true")
    arguments = parser.parse_args()
    bench, runs = Bench(arguments.cold), arguments.runs
    rows = {f"{n:,} tokens": [bench.prompt(n) for _ in range(runs)] for n in map(int, arguments.tokens.split(","))}
    shared = bench.prompt(SHARED)
    rows[f"{SHARED:,} cached + {OWN}"] = [shared + bench.prompt(OWN) for _ in range(runs)]
    for name, prompts in rows.items():
        print(f"{name:20}", "  ".join(f"{part} {ms:.3f}" for part, ms in bench.request(prompts).items()))
    for sequences in () if arguments.cold else (1, 32, 256):
        print(f"{sequences:3} sequences        step {min(bench.step(sequences) for _ in range(3)):.3f}")


if __name__ == "__main__":
    main()
