"""Builds the drafter that the settings ask for, and defines drafters that look drafts up in texts.

Their indices are on the host, which must know all tokens; `adaptive.py` arranges this on a device that runs ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from quire.foundation.config import Config
from quire.foundation.config.speculation import Speculation
from quire.foundation.messages.workers import Admitted, Plan, Result
from quire.models.spec import ModelSpec
from quire.planning.draft_model import DRAFT_TOKENS_A_STEP, drafter_spec
from quire.planning.step_limits import StepLimits
from quire.runtime.worker.kv_tensors import whole_group
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.speculation.draft_model import DraftModel
from quire.runtime.worker.speculation.draft_steps import DraftSteps
from quire.runtime.worker.speculation.step_drafts import StepDrafts
from quire.scheduling.speculation.ngram_index import NgramIndex
from quire.scheduling.speculation.suffix_index import PastOutputs, SuffixIndex

if TYPE_CHECKING:
    from quire.runtime.worker.model_runner import ModelRunner

TOKENS_A_STEP = 2048
"""Maximum prompt tokens that are indexed in a step, over all slots, in about 2 ms. Until a prompt is indexed, its
sequence has fewer drafts, and nothing waits."""
_TOKENS_A_GUESS = 256
"""Maximum tokens of one sequence that are indexed for a guess when no drafts were asked for."""
Index = NgramIndex | SuffixIndex


class Drafter(Protocol):
    """Proposes draft tokens for slots. It is told of every step."""

    @property
    def on_device(self) -> bool:
        """Whether drafts are computed on the device, so that their time is part of the step's."""

    @property
    def read(self) -> int:
        """How many known tokens the last call of `propose` had to read."""

    def begin(self, plan: Plan) -> None:
        """Note the plan's new owners of slots, with all their tokens, and its changes of block tables."""

    def follows(self, plan: Plan) -> bool:
        """Whether drafts for this plan, the next one, can be proposed while the step before still runs."""

    def propose(self, plan: Plan, max_read: int) -> StepDrafts:
        """Propose drafts for a plan that has begun, at most as many as it allows for each sampled row. If reading takes
        long, a sequence with more than `max_read` unread tokens gets none."""

    def record(self, plan: Plan, result: Result) -> None:
        """Note which tokens the plan's rows gained."""

    def first_guess(self, slot: int) -> list[int] | None:
        """Return the first token that would be proposed for a slot, in a list; an empty list if none would be. Returns
        None if finding it would take too long."""


class LookupDrafter:
    """A Drafter that keeps an index of each slot's sequence, made by `new_index`, and looks up what may follow."""

    on_device = False

    def __init__(self, new_index: Callable[[Admitted], Index]) -> None:
        self._new_index = new_index
        self._indices: dict[int, Index] = {}
        self.read = 0

    def begin(self, plan: Plan) -> None:
        for owner in plan.admitted:
            if (before := self._indices.pop(owner.slot, None)) is not None:
                before.close()
            if owner.history:
                self._indices[owner.slot] = self._new_index(owner)

    def follows(self, plan: Plan) -> bool:
        """Return False: indices need all tokens, including those of the step before."""
        return False

    def propose(self, plan: Plan, max_read: int) -> StepDrafts:
        proposed: list[list[int]] = [[] for _ in plan.sampled_rows]
        left = TOKENS_A_STEP
        for place, most in enumerate(plan.drafts):
            index = self._indices.get(plan.slots[plan.sampled_rows[place]]) if most else None
            if index is not None:
                left -= index.catch_up(left)
                proposed[place] = index.propose(most)
        self.read = TOKENS_A_STEP - left
        return StepDrafts.of(proposed)

    def record(self, plan: Plan, result: Result) -> None:
        at = 0
        for row, count in zip(plan.sampled_rows, result.counts, strict=True):
            index = self._indices.get(plan.slots[row])
            if index is not None:
                index.append(result.tokens[at : at + count])
            at += count

    def first_guess(self, slot: int) -> list[int] | None:
        index = self._indices.get(slot)
        if index is None:
            return []
        index.catch_up(_TOKENS_A_GUESS)
        return index.propose(1)


def _lookup_drafter(speculation: Speculation) -> LookupDrafter:
    """Make a drafter that proposes what followed the last tokens before: earlier in the same sequence (`ngram`), or
    most often in the same sequence and in other requests' outputs (`suffix`)."""
    if speculation.method == "ngram":
        longest, shortest = speculation.lookup_max, speculation.lookup_min
        return LookupDrafter(lambda owner: NgramIndex(owner.history, longest, shortest))
    options = speculation.suffix
    past = PastOutputs(options.cached_requests)
    return LookupDrafter(lambda owner: SuffixIndex(owner.history, options, past, owner.cache_salt))


def build_drafter(
    config: Config,
    spec: ModelSpec,
    blocks: int,
    load: Callable[[Config, ModelSpec], ModelRunner],
    followed: SlotTable | None = None,
) -> Drafter | None:
    """Build the drafter; returns None without speculation.

    Args:
        config, spec: Resolved settings and spec of the main model.
        blocks: Number of the main model's KV blocks.
        load: Loads the draft model or head of these settings; returns its runner.
        followed: The main model's slots on a device that runs ahead of the host; None on a CPU.

    Raises:
        SetupError: The draft model cannot be loaded.
    """
    speculation = config.speculation.speculation
    if speculation is None:
        return None
    if speculation.method in ("ngram", "suffix"):
        return _lookup_drafter(speculation)
    group = whole_group(spec)
    limits, draft = StepLimits.of(config), drafter_spec(config)
    assert draft is not None, "a draft model or a head"
    tokens = limits.tokens
    if config.device.device != "cpu":  # whose buffers are made for the largest step
        tokens = min(tokens, max(DRAFT_TOKENS_A_STEP, limits.rows))
    own = config.with_values(
        model=speculation.model, quantization=None, kv_cache_dtype="auto", logits_processors=(), swap_space=0.0,
        kv_offloading_size=None, kv_disk_path=None,
        num_gpu_blocks_override=blocks, speculative_config=None, speculative_model=None, num_speculative_tokens=None,
        enable_lora=False, lora_modules=(), lora_pinned=(), lora_dir=None, max_num_batched_tokens=tokens,
        language_model_only=True,
    )  # fmt: skip
    is_head = draft.head is not None  # its RoPE goes as far as the model's, whatever it was trained on
    longest = limits.length if is_head else min(limits.length, draft.max_model_len)
    steps = DraftSteps(load(own, draft), followed)
    return DraftModel(steps, group, config.cache.block_size, longest, tokens, speculation.tokens, is_head=is_head)
