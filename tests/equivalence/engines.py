"""The engines that schedules run on: tiny fp32 models on a CPU, with so few KV blocks that requests are preempted.

Only names that users of `quire` have are used here, and `DraftLengths`, so that the same schedules run on another
checkout's `quire` too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from quire import LLMEngine, LoRARequest
from tests.adapters import make_adapter
from tests.checkpoints import VOCAB_SIZE, make_llama, make_tiny, write_tokenizer

ADAPTERS = ("all", "attention", "mlp")
BLOCK_SIZE = 8
LIMITS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "block_size": BLOCK_SIZE, "max_model_len": 96, "max_num_seqs": 6,
    "max_num_batched_tokens": 24, "performance_mode": "throughput", "max_logprobs": 8,
}  # fmt: skip
"""Steps so short that most prompts come in chunks. No step is limited by time, so each run plans the same steps."""
ROOMY: dict[str, Any] = {"num_gpu_blocks_override": 120, "swap_space": 0.0, "scheduling_policy": "priority"}
NGRAM: dict[str, Any] = {"speculative_config": {
    "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
}}  # fmt: skip
SUFFIX: dict[str, Any] = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}}


@dataclass(frozen=True)
class Kind:
    """An engine of the schedules.

    Attributes:
        name: In what is printed.
        model: The directory of its checkpoint below the one of all models.
        blocks: KV blocks; a sequence of full length takes 12 of each KV group.
        preemption: How running requests give way; None for the way that is estimated to cost less.
        drafter: The directory of the model that proposes drafts.
        adapts: Steps have as many drafts as pay, as in a server; else all that they may, or any number.
        answers: Settings that change what requests are answered with.
        settings: All others.
    """

    name: str
    model: str
    blocks: int
    preemption: Literal["swap", "recompute"] | None
    drafter: str = ""
    adapts: bool = False
    answers: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def has_adapters(self) -> bool:
        return "enable_lora" in self.answers

    @property
    def has_processors(self) -> bool:
        return "logits_processors" in self.answers

    @property
    def has_priorities(self) -> bool:
        return self.settings.get("scheduling_policy") == "priority"


_LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
_PROCESSED: dict[str, Any] = {
    "logprobs_mode": "processed_logprobs", "logits_processors": ("tests.equivalence.processors:NotTheLast",),
}  # fmt: skip
KINDS = (
    Kind("swap", "llama", 16, "swap"),
    Kind("recompute", "llama", 16, "recompute", settings={"scheduling_policy": "priority"}),
    Kind("window-swap", "gemma", 28, "swap"),
    Kind("window-recompute-ngram", "gemma", 28, "recompute", settings=NGRAM),
    Kind("ngram-swap", "llama", 16, "swap", settings=NGRAM),
    Kind("suffix-uncached", "llama", 16, None, settings=SUFFIX | {"enable_prefix_caching": False}),
    Kind("draft-model-recompute", "llama", 16, "recompute", "draft"),
    Kind("own-drafts-swap", "llama", 20, "swap", "llama"),
    Kind("own-drafts-adaptive", "llama", 16, "recompute", "llama", adapts=True),
    Kind("ngram-adaptive", "gemma", 28, "swap", adapts=True, settings=NGRAM),
    Kind("head", "llama", 16, "recompute", "head"),
    Kind("adapters-swap", "llama", 16, "swap", answers=_LORA),
    Kind("adapters-ngram-recompute", "llama", 16, "recompute", answers=_LORA, settings=NGRAM),
    Kind("processed-swap", "llama", 16, "swap", answers=_PROCESSED),
    Kind("processed-ngram-recompute", "llama", 16, "recompute", answers=_PROCESSED, settings=NGRAM),
)


def make_models(directory: Path) -> None:
    """Write all checkpoints; those that are there already stay."""
    if (directory / "complete").exists():
        return
    from tests.heads import make_eagle3

    llama = make_llama(directory / "llama", layers=2)
    make_llama(directory / "draft", layers=1, seed=9)
    make_eagle3(directory / "head", vocab_size=VOCAB_SIZE, draft_vocab=200, sources=(0, 1))
    gemma = make_tiny(directory / "gemma", "Gemma2ForCausalLM", head_dim=16, sliding_window=20)
    write_tokenizer(gemma)
    for seed, (name, rank, modules) in enumerate(
        (("all", 8, {}), ("attention", 4, {"modules": ("q_proj", "v_proj")}), ("mlp", 16, {"modules": ("down_proj",)}))
    ):
        make_adapter(directory / name, llama, rank=rank, seed=seed, **modules)
    (directory / "complete").touch()


def start(kind: Kind, models: Path) -> LLMEngine:
    """An engine of this kind."""
    own: dict[str, Any] = {"num_gpu_blocks_override": kind.blocks, "preemption_mode": kind.preemption}
    own["swap_space"] = 0.0 if kind.preemption == "recompute" else 0.01
    if kind.drafter:
        method = {"method": "eagle3"} if kind.drafter == "head" else {}
        drafter = {"model": str(models / kind.drafter), "num_speculative_tokens": 3}
        own["speculative_config"] = method | drafter
    return LLMEngine(str(models / kind.model), **LIMITS | own | kind.answers | kind.settings)


def start_roomy(kind: Kind, models: Path) -> LLMEngine:
    """An engine that gives the same answers, and in which nothing is preempted and nothing drafted."""
    return LLMEngine(str(models / kind.model), **LIMITS | ROOMY | kind.answers)


def adapter(name: str, models: Path) -> LoRARequest:
    """One of ADAPTERS."""
    return LoRARequest(name, 1 + ADAPTERS.index(name), str(models / name))


class Drafting:
    """How many drafts steps have where that does not depend on what pays: tiny models are as fast as their drafts."""

    def __init__(self) -> None:
        self._kind, self._all, self._luck = KINDS[0], True, random.Random()

    def begin(self, seed: int, kind: Kind) -> None:
        """Another schedule begins; no step is in flight."""
        self._kind, self._luck = kind, random.Random(seed)
        self._all = self._luck.random() < 0.5

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Decide for all engines of this process."""
        from quire.runtime.worker.speculation.draft_lengths import Choice, DraftLengths

        chosen = DraftLengths.choose

        def choose(lengths: Any, tokens: int, slots: list[int], most: Any) -> Choice:
            if self._kind.adapts:
                return chosen(lengths, tokens, slots, most)
            drafts = most.copy()
            if not self._all:
                drafts[:] = [self._luck.randint(0, each) for each in most.tolist()]
            return Choice(drafts, 1e6)

        DraftLengths.choose = choose
        try:
            yield
        finally:
            DraftLengths.choose = chosen
