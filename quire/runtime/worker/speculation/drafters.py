"""The drafter of some settings, and those that look drafts up in texts.

Their indices lie on the host, which must know all tokens: on a device that runs ahead of it, see `adaptive.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from quire.foundation.config import Config
from quire.foundation.config.speculation import Speculation
from quire.foundation.messages.workers import Admitted, Plan, Result
from quire.models.spec import ModelSpec, read_spec
from quire.planning.draft_model import DRAFT_TOKENS_A_STEP
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
"""Tokens of prompts that are read in a step, of all slots together: some 2 ms. Meanwhile their sequences have fewer
drafts, and nobody waits."""
_TOKENS_A_GUESS = 256
"""Tokens of one slot's sequence that are read for a guess, where nobody has asked for drafts."""
Index = NgramIndex | SuffixIndex
"""A sequence's tokens, and what may follow them."""


class Drafter(Protocol):
    """Proposes draft tokens for slots. It hears of every step."""

    @property
    def on_device(self) -> bool:
        """Whether drafting is only launched, so that its time is the step's."""
        ...

    @property
    def read(self) -> int:
        """How many known tokens it had to read for what it proposed last."""
        ...

    def begin(self, plan: Plan) -> None:
        """Take in a plan's new owners of slots, with all their tokens, and its changes of block tables."""
        ...

    def follows(self, plan: Plan) -> bool:
        """Whether it can propose drafts for this plan, the next one, while the step before still runs."""
        ...

    def propose(self, plan: Plan, max_read: int) -> StepDrafts:
        """Propose drafts for a plan that has begun: up to as many as it says for each sampled row. A sequence of which
        more than `max_read` tokens would have to be read first gets none, if reading takes long."""
        ...

    def record(self, plan: Plan, result: Result) -> None:
        """Take in what the plan's rows gained."""
        ...

    def first_guess(self, slot: int) -> list[int] | None:
        """The token that it would propose first for a slot, in a list that is empty if it would propose none; None:
        finding it would take too long."""
        ...


class LookupDrafter:
    """A Drafter that keeps an index of each slot's sequence, and looks up in it what may follow.

    Args:
        new_index: Makes the index of a slot's new owner.
    """

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
        """Always False: indices need all tokens, also those of the step before."""
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
    """A drafter that proposes what followed the last tokens: earlier in the same sequence (`ngram`), or most often, in
    the same sequence and in other requests' outputs (`suffix`)."""
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
    load: Callable[[Config], ModelRunner],
    followed: SlotTable | None = None,
) -> Drafter | None:
    """The drafter; None: there are no drafts.

    Args:
        config: Resolved settings of the model that verifies.
        spec: Of that model.
        blocks: Its KV blocks.
        load: Loads the model of other settings; returns its runner.
        followed: The model's slots, on a device that runs ahead of the host; None on any other.

    Raises:
        SetupError: The draft model cannot be loaded.
    """
    speculation = config.speculation.speculation
    if speculation is None:
        return None
    if speculation.method in ("ngram", "suffix"):
        return _lookup_drafter(speculation)
    group = whole_group(spec)
    limits, draft = StepLimits.of(config), read_spec(speculation.model)
    tokens = limits.tokens
    if config.device.device != "cpu":  # whose buffers are made for the largest step
        tokens = min(tokens, max(DRAFT_TOKENS_A_STEP, limits.rows))
    own = config.with_values(
        model=speculation.model, quantization=None, kv_cache_dtype="auto", logits_processors=(), swap_space=0.0,
        num_gpu_blocks_override=blocks, speculative_config=None, speculative_model=None, num_speculative_tokens=None,
        enable_lora=False, lora_modules=(), lora_pinned=(), lora_dir=None, max_num_batched_tokens=tokens,
    )  # fmt: skip
    is_head = draft.head is not None  # its RoPE goes as far as the model's, whatever it was trained on
    longest = limits.length if is_head else min(limits.length, draft.max_model_len)
    steps = DraftSteps(load(own), followed)
    return DraftModel(steps, group, config.cache.block_size, longest, tokens, speculation.tokens, is_head=is_head)
