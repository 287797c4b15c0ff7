"""Engines of tiny fp32 models that hold random conversations, and the same models without a cache or drafts.

    python -m tests.equivalence.conversation_engines --scripts 1000

holds so many on engines of each kind in turn, and says how much of what was cached prompts shared.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from quire.engine.build import build_model_runtime_info
from quire.engine.inprocess import InProcessClient
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config
from quire.foundation.messages.from_engine import Ready
from quire.planning.auto_config import resolve
from quire.runtime.executor.factory import build_executor
from quire.runtime.worker.speculation import lookup_drafter
from quire.runtime.worker.speculation.draft_lengths import Choice, DraftLengths
from tests.checkpoints import make_tiny, write_tokenizer
from tests.engine.harness import Engine, Outcome, add
from tests.equivalence.conversations import Conversations, Hits, counted_hits
from tests.models_sweep.rows import ROWS, SHAPE

LONGEST = 200
TIE = 1e-4
"""Log probabilities that differ by less are as good as each other."""
ROWS_AT_ONCE = 4
COMMON: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "block_size": 8, "max_model_len": LONGEST, "performance_mode": "throughput",
}  # fmt: skip
ROOMY: dict[str, Any] = {"num_gpu_blocks_override": 400, "num_states_override": 160}
SCARCE: dict[str, Any] = {
    "num_gpu_blocks_override": 15, "num_states_override": ROWS_AT_ONCE + 30, "max_model_len": 112,
}  # fmt: skip
TIER: dict[str, Any] = SCARCE | {"preemption_mode": "swap", "kv_offloading_size": 0.01}
"""Room for one conversation on the device, and for all of them on the host."""
WINDOWED: dict[str, Any] = {"num_gpu_blocks_override": 36, "max_model_len": 112}
SWAPPED: dict[str, Any] = {"preemption_mode": "swap", "swap_space": 0.01}
DRAFTS: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
"""An `Oracle` guesses, so that drafts are accepted and rejected at every place."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2, roomy": ("Lfm2ForCausalLM", ROOMY),
    "lfm2, swapped": ("Lfm2ForCausalLM", SCARCE | SWAPPED),
    "qwen3 next, recomputed": ("Qwen3NextForCausalLM", SCARCE | {"preemption_mode": "recompute"}),
    "mamba2": ("Mamba2ForCausalLM", {"num_states_override": 160}),
    "lfm2, few states": ("Lfm2ForCausalLM", ROOMY | {"num_states_override": ROWS_AT_ONCE + 3}),
    "qwen3 next, roomy": ("Qwen3NextForCausalLM", ROOMY | {"mamba_block_size": 32}),
    "lfm2, drafts, swapped": ("Lfm2ForCausalLM", SCARCE | SWAPPED | DRAFTS),
    "qwen3 next, drafts": ("Qwen3NextForCausalLM", ROOMY | DRAFTS),
    "granite 4, drafts, recomputed": (
        "GraniteMoeHybridForCausalLM",
        SCARCE | {"preemption_mode": "recompute"} | DRAFTS,
    ),
    "mamba2, drafts": ("Mamba2ForCausalLM", {"num_states_override": 160} | DRAFTS),
    "deepseek v3, drafts": ("DeepseekV3ForCausalLM", SCARCE | SWAPPED | DRAFTS),
    "gemma 4, drafts": ("Gemma4ForCausalLM", WINDOWED | {"preemption_mode": "recompute"} | DRAFTS),
    "gpt-oss": ("GptOssForCausalLM", WINDOWED | SWAPPED),
    "llama, host tier": ("LlamaForCausalLM", TIER),
    "gemma3, host tier": ("Gemma3ForCausalLM", TIER | {"num_gpu_blocks_override": 40}),
    "deepseek v3, drafts, host tier": ("DeepseekV3ForCausalLM", TIER | DRAFTS),
    "lfm2, host tier": ("Lfm2ForCausalLM", TIER),
}
NOT_COUNTED = ("mamba2", "mamba2, drafts", "lfm2, few states")
"""Mamba2 has no blocks to compare with; the other one has room for fewer checkpoints than there are conversations."""


class ModelEngine(Engine):
    """An engine of a model with a CPU worker."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self._wait = 60.0
        resolved = resolve(Config().with_values(model=str(directory), **COMMON | settings))
        clock = SystemClock()
        info = build_model_runtime_info(resolved.config, resolved.spec)
        self.client = InProcessClient(resolved.config, build_executor(resolved.config, clock), clock, info)
        self.outcome = Outcome()
        assert isinstance(self.client.receive(0), Ready)

    def finish_steps(self) -> None:
        before, self._wait = self._wait, 0.01  # nothing may come of what is left
        while (counts := self.client.counts())["in_flight"] or counts["moves"]:
            self.step()
        self._wait = before


def make_model(directory: Path, architecture: str) -> Path:
    """Write a tiny model with a tokenizer."""
    write_tokenizer(make_tiny(directory, architecture, **SHAPE | ROWS[architecture]))
    return directory


class Oracle:
    """An index of one sequence that knows how it goes on, up to the first of its drafts that is a wrong guess.

    Args:
        known: Sequences with their answers, and whatever else begins alike.
    """

    def __init__(self, tokens: Sequence[int], known: Sequence[Sequence[int]], rng: random.Random) -> None:
        self._tokens = list(tokens)
        self._known = known
        self._rng = rng

    def append(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def catch_up(self, most: int) -> int:
        return 0

    def propose(self, most: int) -> list[int]:
        at, rng = len(self._tokens), self._rng
        drafts = next((list(each[at : at + most]) for each in self._known if each[:at] == self._tokens), [])
        drafts += [0] * (most - len(drafts))
        if wrong := rng.randrange(most + 1):
            drafts[wrong - 1] += 1 if not drafts[wrong - 1] else -1
        return drafts[: rng.randint(0, most)]

    def close(self) -> None:
        pass


@contextmanager
def guessing(known: Sequence[Sequence[int]]) -> Iterator[None]:
    """Let all drafters that look up n-grams ask an Oracle, however little that pays."""
    rng = random.Random(0)
    with (
        mock.patch.object(lookup_drafter, "NgramIndex", lambda tokens, *_: Oracle(tokens, known, rng)),
        mock.patch.object(DraftLengths, "choose", lambda lengths, tokens, slots, most: Choice(most.copy(), 1e6)),
    ):
        yield


class Held:
    """Holds scripts of conversations on one kind of engine, and compares them with a model that caches nothing."""

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        self.engine = ModelEngine(
            directory,
            **{"max_num_seqs": ROWS_AT_ONCE, "max_num_batched_tokens": 40, "mamba_block_size": 16} | settings,
        )
        self._known: list[list[int]] = []
        self.ties = 0
        cold = {"max_num_seqs": 1, "max_num_batched_tokens": LONGEST, "num_gpu_blocks_override": 150}
        self._cold = ModelEngine(directory, enable_prefix_caching=False, **cold)
        self._number = 0
        self._longest = settings.get("max_model_len", LONGEST)

    def run(self, seed: int, rounds: int = 4) -> None:
        """Hold the conversations of a seed."""
        script = Conversations(
            random.Random(seed), self.engine, self._alone, SHAPE["vocab_size"], self._longest - 12, self._is_tie
        )
        with guessing(self._known):
            script.hold(rounds)
        self._known.clear()
        self.engine.outcome.tokens.clear()
        self.engine.outcome.ends.clear()

    def close(self) -> None:
        self.engine.client.close()
        self._cold.client.close()

    def _is_tie(self, text: Sequence[int], first: int, second: int) -> bool:
        self._number += 1
        outcome = self._cold.run([add(self._number, text, 1, logprobs=2)])
        (found,) = outcome.logprobs[self._number]
        assert found is not None
        self.ties += 1
        return set(found.top_ids) == {first, second} and abs(found.top_logprobs[0] - found.top_logprobs[1]) < TIE

    def _alone(self, prompt: Sequence[int], most: int) -> list[int]:
        self._number += 1
        tokens = self._cold.run([add(self._number, prompt, most)]).tokens[self._number]
        self._known.append([*prompt, *tokens])
        return tokens


@contextmanager
def held(directory: Path, kind: str) -> Iterator[Held]:
    """Start the engines of one of KINDS, and close them."""
    architecture, settings = KINDS[kind]
    model = directory / architecture
    made = Held(model if model.exists() else make_model(model, architecture), settings)
    try:
        yield made
    finally:
        made.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Hold conversations on all kinds of engines; 1 if prompts share less than nine tenths of what is cached."""
    parser = argparse.ArgumentParser(prog="python -m tests.equivalence.conversation_engines", description=__doc__)
    parser.add_argument("--scripts", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first one")
    options = parser.parse_args(arguments)
    total = Hits()
    with tempfile.TemporaryDirectory() as directory:
        for number, kind in enumerate(KINDS):
            seeds = range(options.first + number, options.first + options.scripts, len(KINDS))
            with counted_hits() as hits, held(Path(directory), kind) as engines:
                for seed in seeds:
                    engines.run(seed)
                preemptions = engines.engine.client.counts()["preemptions"]
            print(
                f"{kind:29} {len(seeds):5} scripts, {preemptions:5} preemptions, {engines.ties} ties, {hits}",
                flush=True,
            )
            if kind not in NOT_COUNTED:
                total.cached, total.shared = total.cached + hits.cached, total.shared + hits.shared
    print(
        f"{'all':29} {options.scripts:5} scripts, shared {total.shared / max(1, total.cached):.1%} of what was cached"
    )
    return 0 if total.shared >= 0.9 * total.cached else 1


if __name__ == "__main__":
    sys.exit(main())
