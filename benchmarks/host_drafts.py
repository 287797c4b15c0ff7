"""What a step with drafts costs the host, where a device drafts and verifies: ms of this thread's CPU time.

    python benchmarks/host_drafts.py [--rows 1,32] [--drafts 0,4] [--method draft_model] [--steps 300] [--profile]

Quill with its draft model, its EAGLE-3 head, or n-grams where none is found again (`--method ngram --drafts 0`), on the
executor of a GPU. A CPU takes its place whose captured steps do nothing: each row gains three tokens, or one where it
has no drafts. So what is left is engine and worker, and small changes of the slot table; events and launches, which
cost a real host some µs each, are not in it. Prints the median of turns of the engine's loop, beside those of an engine
without speculation; `by_plain` is a token's cost against it.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.compute.attention.metadata import IntArray
from quire.engine.core import EngineCore
from quire.runtime.executor import factory
from quire.runtime.executor.gpu_executor import GpuExecutor
from quire.runtime.worker import buffer_ring
from quire.runtime.worker.replay import CudaGraphs
from quire.runtime.worker.sampling import sampled_outputs
from quire.runtime.worker.speculation.draft_lengths import Choice, DraftLengths
from quire.runtime.worker.speculation.verification import Verifier
from quire.runtime.worker.step import Step
from quire.runtime.worker.worker import Worker
from quire.runtime.worker.worker_parts import LoadedModel
from quire.scheduling.speculation.ngram_index import NgramIndex

GAINED = 3
CAPTURED = 512
VOCABULARY = 4096
MAX_POSITIONS = 128
"""That captured steps sample of many rows: others are no figure for this."""
CHOOSE, BEST = DraftLengths.choose, DraftLengths._best


class NoGraphs(CudaGraphs):
    """CudaGraphs whose replay does nothing."""

    def capture(self, step: Step, compute: Callable[[Step], Tensor]) -> None:
        assert step.shape is not None
        self._logits[step.shape, step.adapted] = torch.zeros((step.shape.sampled, VOCABULARY))

    def replay(self, step: Step) -> Tensor:
        assert step.shape is not None
        step.staged.copy_by_replay()
        return self._logits[step.shape, step.adapted]


def take_the_place_of_a_gpu() -> None:
    """All engines that are made from now on."""

    def capture(self: Worker, loaded: LoadedModel) -> None:
        assert isinstance(self._runner._replayable, CudaGraphs)
        self._runner._replayable = NoGraphs(self._runner._replayable.short)
        self._runner.capture_graphs(CAPTURED)
        verifier = self._runner._verifier
        on_device = self._runner.slots.drafts.shape[1] > 0
        for name in ("_look_up_tokens", "_position_columns", "_sample", "_verify_drafts") if on_device else ():
            setattr(verifier, name, lambda *given, **named: None)
        assert self._runner._sampler is not None
        for buffer in self._runner._sampler.outputs._buffers.host:
            buffer.fill_(GAINED)  # tokens, and how many of them each row gains
        for tokens, faults in self._runner._sampler.outputs._on_host:
            tokens.fill(GAINED)
            faults.fill(0)

    def send(self: sampled_outputs.SampledOutputs) -> None:
        """What the host reads is there."""

    take_back = Verifier._take_back

    def gain_no_more_than_drafts(self: Verifier, step: Step, owners: IntArray, gained: IntArray) -> None:
        gained[:] = (step.drafts.counts + 1).clip(max=GAINED)
        take_back(self, step, owners, gained)

    Verifier._take_back = gain_no_more_than_drafts  # type: ignore[method-assign]
    factory.CpuExecutor = lambda config, clock, host_memory: GpuExecutor(config, clock)  # type: ignore
    buffer_ring._has_memory = lambda device: True  # type: ignore[assignment]
    Worker.capture_graphs = capture  # type: ignore[method-assign]
    sampled_outputs.SampledOutputs.send = send  # type: ignore[method-assign]


def fix_drafts(number: int) -> None:
    """Each row has so many from now on, whatever is chosen; 0: they do not pay, and the engine is told so."""
    if not number:
        DraftLengths.choose = CHOOSE  # type: ignore[method-assign]
        DraftLengths._best = lambda *given: None  # type: ignore[method-assign]
        return

    def chosen(self: DraftLengths, tokens: int, slots: list[int], most: IntArray) -> Choice:
        self._since_drafts = 0
        CHOOSE(self, tokens, slots, most)
        self._since_drafts = 0
        return Choice(most.clip(max=number), 1e6)

    DraftLengths.choose, DraftLengths._best = chosen, BEST  # type: ignore[method-assign]


def find_nothing() -> None:
    """Looked for as ever: all tokens of the stand-in are the same, so that it would always find some."""
    propose = NgramIndex.propose

    def nothing(self: NgramIndex, most: int) -> list[int]:
        return propose(self, most)[:0]

    NgramIndex.propose = nothing  # type: ignore[method-assign]


def measure(llm: LLM, rows: int, steps: int, profile: cProfile.Profile | None = None) -> float:
    """Median milliseconds of a turn in which one step is planned and launched, and one is finished."""
    times: list[float] = []
    turn = EngineCore.turn

    def timed(self: EngineCore, wait: float | None) -> None:
        began = time.thread_time()
        turn(self, wait)
        times.append(time.thread_time() - began)

    params = SamplingParams(temperature=0, max_tokens=GAINED * steps, ignore_eos=True, detokenize=False)
    prompts: Sequence[Any] = [{"prompt_token_ids": [5 + row, *range(10, 30)]} for row in range(rows)]
    EngineCore.turn = timed  # type: ignore[method-assign]
    try:
        if profile is not None:
            profile.enable()
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        if profile is not None:
            profile.disable()
        EngineCore.turn = turn  # type: ignore[method-assign]
    return statistics.median(times[len(times) // 4 :]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--drafts", default="0,4")
    parser.add_argument("--method", choices=["draft_model", "eagle3", "ngram"], default="draft_model")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", action="store_true", help="where the time of the last figure goes")
    options = parser.parse_args()
    if options.method == "ngram" and options.drafts != "0":
        parser.error("--method ngram finds nothing, and has no drafts: --drafts 0.")
    torch.set_num_threads(1)
    take_the_place_of_a_gpu()
    shared: dict[str, Any] = {
        "max_model_len": 2048, "max_num_seqs": 32, "enable_prefix_caching": False, "num_gpu_blocks_override": 4200,
        "dtype": "float32", "max_num_batched_tokens": 512,
    }  # fmt: skip
    model = {"draft_model": {"model": "quill_draft"}, "eagle3": {"model": "quill_eagle3"}}.get(options.method, {})
    speculation = {"method": options.method, "num_speculative_tokens": 4, **model}
    if options.method == "ngram":
        find_nothing()
    off, on = LLM("quill", **shared), LLM("quill", speculative_config=speculation, **shared)
    for rows in map(int, options.rows.split(",")):
        plain = min(measure(off, rows, options.steps) for _ in range(3))
        print(json.dumps({"rows": rows, "drafts": None, "ms": round(plain, 4)}), flush=True)
        for asked in map(int, options.drafts.split(",")):
            drafts = min(asked, MAX_POSITIONS // rows - 1)
            fix_drafts(drafts)
            ms = min(measure(on, rows, options.steps) for _ in range(3))
            by_plain = ms / plain / (GAINED if drafts else 1)
            print(json.dumps({"rows": rows, "drafts": drafts, "ms": round(ms, 4), "by_plain": round(by_plain, 3)}))
    if options.profile:
        profile = cProfile.Profile()
        measure(on, rows, options.steps, profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
