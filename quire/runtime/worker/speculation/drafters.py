"""The drafter of some settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.foundation.config import Config
from quire.models.spec import ModelSpec, read_spec
from quire.planning.draft_model import DRAFT_TOKENS_A_STEP
from quire.planning.step_limits import StepLimits
from quire.runtime.worker.kv_tensors import whole_group
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.speculation.draft_model import DraftModel
from quire.runtime.worker.speculation.draft_steps import DraftSteps, DraftStepsAhead
from quire.runtime.worker.speculation.lookup_drafter import ngram_drafter, suffix_drafter
from quire.runtime.worker.speculation.step_drafts import Drafter

if TYPE_CHECKING:
    from quire.runtime.worker.model_runner import ModelRunner

_LOOKUP = {"ngram": ngram_drafter, "suffix": suffix_drafter}


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
    if speculation.method in _LOOKUP:
        return _LOOKUP[speculation.method](speculation)
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
    runner = load(own)
    steps = DraftSteps(runner) if followed is None else DraftStepsAhead(runner, followed)
    return DraftModel(steps, group, config.cache.block_size, longest, tokens, speculation.tokens, is_head=is_head)
