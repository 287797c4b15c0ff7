"""One step on its way through the worker: its plan, its rows, and its columns on the device.

A Plan (lists) becomes a HostBatch (numpy columns), then StepInputs (the columns on the device), then a Batch (what the
device derives from them and from the slot table).
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
from quire.runtime.worker.step_handle import StepTimer

if TYPE_CHECKING:
    from quire.compute.kernels.reference.lora import Tiles
    from quire.compute.kernels.reference.state_inputs import StateRows
    from quire.runtime.worker.graph_shapes import GraphShape
    from quire.runtime.worker.host_batch import HostBatch
    from quire.runtime.worker.pooling import Vectors
    from quire.runtime.worker.sampling.logprobs import LogprobsRequest, PromptsLogprobs
    from quire.runtime.worker.staging_buffer import StagedColumns

NO_POSITIONS = np.zeros(0, dtype=np.int64)
StepKey = tuple[int, ...]
"""Identifies a step's rows, counts and drafts; steps with equal keys are staged alike. The empty key means "not
kept"."""


class StepKind(Enum):
    """How a step ends."""

    COMPUTE = auto()
    """Nothing is sampled: the rows are parts of prompts, or a later stage of the pipeline samples."""
    SAMPLE = auto()
    """Each sampled row gains one token."""
    VERIFY = auto()
    """Each sampled row gains its accepted drafts and one more token."""
    DRAFT = auto()
    """Each sampled row gains a draft that only the device knows."""


class StepInputs(NamedTuple):
    """Device tensors of one step, all int64; padding belongs to the dummy slot. This is a tuple for speed, because one
    is made for every step.

    Attributes:
        slots, counts, row_of_token, offsets, token_ids: The columns of HostBatch.
        sampled_slots: [sampled], the slots for which the step samples.
        logits_indices: [sampled], the token index of each sampled position; None if all tokens are sampled.
        drafts: The drafts of a short step whose graph verifies them; None in any other step.
        tiles: Which tokens have which adapter; None if no token has one.
        expert_slots: [tokens], the slot of the token's adapter if it changes experts, else 0; None if no adapter
            changes experts.
        stage_step: [1], the step's number for other stages of a pipeline; None without other stages.
        state_rows: The rows as layers with states take them; None if no layer has any.
    """

    slots: Tensor
    token_ids: Tensor
    counts: Tensor
    row_of_token: Tensor
    offsets: Tensor
    attention: AttentionMetadata
    sampled_slots: Tensor
    logits_indices: Tensor | None
    drafts: DraftColumns | None = None
    tiles: Tiles | None = None
    expert_slots: Tensor | None = None
    stage_step: Tensor | None = None
    state_rows: StateRows | None = None


@dataclass(slots=True)
class Step:
    """A step; each part of the pipeline in `model_runner.py` adds the fields that later parts need.

    Logits are not a field, because their memory is freed when tokens are sampled, while a step lives until its result
    is taken.

    Attributes:
        host: The rows, before padding.
        shape: The captured shape that the step is padded to and replayed as; None: it is launched kernel by kernel.
        key: The key under which the staged columns are kept for later steps; empty if they are not kept.
        alike: Copied columns of an earlier step with the same key, which are staged again; None if there is no such
            step.
        verified_by_graph: Whether the captured graph verifies the drafts.
        stops_at_logits: Whether the replay stops before its last kernel, which samples. `Sampler.end` or the verifier
            then finishes it. Only on a CPU.
        late: [late], positions that are sampled after the forward pass. In a SAMPLE step these are the masked
            positions, or all positions if an unmasked one has logits transforms or if processed scores are reported. In
            a VERIFY step these are all positions, unless its graph verifies.
        masked: [masked], indices into `late` of the positions that wait for bitmasks.
        logprobs: The log probabilities to report of sampled tokens; None if none are asked for.
        prompts: Collects log probabilities of prompts; None if none are asked for.
        vectors: Collects vectors of texts; None if none are asked for.
        inputs, staged: The columns on the device, and their copy to it. `stage` sets them, but no `inputs` in a step
            with `alike`.
        late_columns: What the device needs to sample `late`: in a SAMPLE step positions, slots and masked ones; in a
            VERIFY step slots, offsets, next drafts and ends. None if nothing is late or the step stops at its logits.
    """

    plan: Plan
    kind: StepKind
    host: HostBatch
    timer: StepTimer = field(default_factory=StepTimer)
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
    vectors: Vectors | None = None
    inputs: StepInputs = field(init=False)
    staged: StagedColumns = field(init=False)
    late_columns: Tensor | None = None

    @property
    def number(self) -> int:
        return self.plan.step

    def prompt_logprobs(self) -> list[list[TokenLogprobs]]:
        """Return log probabilities of prompts, one list for each row that reports any. Call this once the device is
        done."""
        return [] if self.prompts is None else self.prompts()

    @property
    def slots(self) -> IntArray:
        """The slot of each sampled position, [sampled]."""
        return self.host.sampled_slots

    @property
    def all_late(self) -> bool:
        """Whether every position is sampled late."""
        return len(self.late) == len(self.host.sampled_slots)

    @property
    def keeps_scores(self) -> bool:
        """Whether the reported log probabilities are of the scores that tokens were sampled from."""
        return self.logprobs is not None and self.logprobs.processed
