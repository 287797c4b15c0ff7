"""One step on its way through the worker: what it is to do, its rows, and its columns on the device.

The way of a plan: Plan (lists) → HostBatch (numpy columns) → StepInputs (the columns on the device) → Batch (what
follows from them and from the slot table).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from quire.compute.attention.metadata import AttentionMetadata, IntArray
from quire.foundation.messages.workers import Plan, TokenLogprobs
from quire.models.lora.step_tiles import Adapted
from quire.runtime.worker.speculation.step_drafts import NO_DRAFTS, DraftColumns, StepDrafts
from quire.runtime.worker.step_handle import HostTimer, StepTimer

if TYPE_CHECKING:
    from quire.compute.kernels.reference.lora import Tiles
    from quire.runtime.worker.graph_shapes import GraphShape
    from quire.runtime.worker.host_batch import HostBatch
    from quire.runtime.worker.sampling.logprobs import LogprobsRequest, PromptsLogprobs
    from quire.runtime.worker.staging_buffer import StagedColumns

EMPTY_PLAN = Plan.empty()
NO_POSITIONS = np.zeros(0, dtype=np.int64)
StepKey = tuple[int, ...]
"""Names a step's rows, counts and drafts: steps of equal keys are staged alike. Empty for a step that is not kept."""


class StepKind(Enum):
    """How a step ends."""

    COMPUTE = auto()
    """Nothing is sampled: its rows are parts of prompts, or this is an earlier stage of a pipeline."""
    SAMPLE = auto()
    """Each sampled row gains a token."""
    VERIFY = auto()
    """Each sampled row gains those of its drafts that stay, and one token more."""
    DRAFT = auto()
    """Each sampled row gains a draft, of which only the device is told."""


class StepInputs(NamedTuple):
    """Device tensors of one step; all int64. Padding belongs to the dummy slot. Fields are used by name; it is a tuple
    because one is made for every step.

    Attributes:
        slots, counts, row_of_token, offsets, token_ids: The columns of HostBatch.
        attention: The attention backend's metadata.
        sampled_slots: [sampled], the slots for which the step samples.
        logits_indices: [sampled], where among the tokens each sampled position is; None: all tokens are sampled.
        drafts: The drafts of a short step that is verified by its graph; None in any other step.
        tiles: Which tokens have which adapter; None: none has any.
        expert_slots: [tokens], for each token whose adapter changes experts the adapter's slot, and else 0; None where
            no adapter changes experts.
        stage_step: [1], what other stages of a pipeline know the step's streams by; None without other stages.
    """

    slots: Tensor
    token_ids: Tensor
    counts: Tensor
    row_of_token: Tensor
    offsets: Tensor
    attention: AttentionMetadata
    sampled_slots: Tensor
    logits_indices: Tensor | None
    drafts: DraftColumns[Tensor] | None = None
    tiles: Tiles | None = None
    expert_slots: Tensor | None = None
    stage_step: Tensor | None = None


@dataclass(slots=True)
class Step:
    """A step; each part of the pipeline in `model_runner.py` adds what the next ones need.

    Logits are no field: their memory goes back as soon as they are sampled from, while a step lives until its result is
    taken.

    Attributes:
        plan: What the engine asks for.
        kind: How the step ends.
        host: The rows, before padding.
        timer: Measures how long the step takes.
        drafts: The drafts that are verified.
        adapted: What adapters change of the model for these rows.
        shape: The captured shape that the step is padded to and replayed as; None: it runs kernel by kernel.
        key: What the columns that are staged for the step are kept under; empty if they are not kept.
        alike: The columns that an earlier step of this key copied to the device, to be copied again; None without one.
        verified_by_graph: Whether the graph verifies the drafts.
        stops_at_logits: Whether a replay ends before its last kernel, which samples; `Sampler.end` or the verifier
            finish it. On a CPU only.
        late: [late], positions that are sampled behind the forward pass. Of a step that samples: the masked ones, or
            all where an unmasked one has logits transforms or processed scores are reported. Of a step that verifies:
            all, unless its graph does.
        masked: [masked], which of `late` wait for their bitmasks.
        logprobs: Log probabilities that are reported of sampled tokens; None: none are.
        prompts: Collects log probabilities of prompts; None: none are reported.
        inputs: The columns on the device, once they are staged; not for a step with `alike`.
        staged: The columns on their way to the device, once they are staged.
        late_columns: What the device needs to sample `late`: positions, their slots and the masked ones; or slots,
            offsets, next drafts and ends of drafts. None if nothing is late, or the step stops at its logits.
    """

    plan: Plan
    kind: StepKind
    host: HostBatch
    timer: StepTimer = field(default_factory=HostTimer)
    drafts: StepDrafts = NO_DRAFTS
    adapted: Adapted = Adapted.NOTHING
    shape: GraphShape | None = None
    key: StepKey = ()
    alike: IntArray | None = None
    verified_by_graph: bool = False
    stops_at_logits: bool = False
    late: IntArray = field(default_factory=lambda: NO_POSITIONS)
    masked: IntArray = field(default_factory=lambda: NO_POSITIONS)
    logprobs: LogprobsRequest | None = None
    prompts: PromptsLogprobs | None = None
    inputs: StepInputs = field(init=False)
    staged: StagedColumns = field(init=False)
    late_columns: Tensor | None = None

    @property
    def number(self) -> int:
        """The plan's number."""
        return self.plan.step

    def prompt_logprobs(self) -> list[list[TokenLogprobs]]:
        """Log probabilities of prompts, a list for each row that reports any, once the device is done."""
        return [] if self.prompts is None else self.prompts()

    @property
    def slots(self) -> IntArray:
        """[sampled], the slot of each sampled position."""
        return self.host.sampled_slots

    @property
    def all_late(self) -> bool:
        """Whether no position is sampled by the recorded or launched step itself."""
        return len(self.late) == len(self.host.sampled_slots)

    @property
    def keeps_scores(self) -> bool:
        """Whether log probabilities are reported of the scores that tokens were sampled from."""
        return self.logprobs is not None and self.logprobs.processed
