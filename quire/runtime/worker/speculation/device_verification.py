"""Verification on a device that runs ahead of the host: the same decisions as `verification.py`, without waiting.

All positions are sampled at once, a kernel moves the slots to what stays, and the host reads how many tokens that are
once they are there; it need not know the drafts. So the next step can be launched behind it. What a logits transform
changes depends on tokens before it, which only the device knows here: rows with transforms have no drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.sample import SamplingColumns, SamplingThresholds, apply_thresholds
from quire.foundation.messages.workers import Result, TokenLogprobs
from quire.runtime.worker.host_memory import upload
from quire.runtime.worker.sampling.logprobs import LogprobsMode
from quire.runtime.worker.sampling.sampled_outputs import Sampled, SampledOutputs
from quire.runtime.worker.sampling.sampler import columns_of, sample
from quire.runtime.worker.sampling.token_bitmasks import BitmaskBuffer
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.speculation.step_drafts import DraftColumns
from quire.runtime.worker.speculation.synthetic_acceptance import SyntheticAcceptance
from quire.runtime.worker.speculation.verification import Verified, behind_bitmasks, result_of
from quire.runtime.worker.staging_buffer import to_device_memory
from quire.runtime.worker.step import Step
from quire.runtime.worker.step_handle import StepHandle


class DeviceVerifier:
    """Verifies drafts for the slots of a table.

    Args:
        slots: The table.
        most: Positions of a step, at most.
        mode: What is reported.
        bitmasks: Where masks of a step are kept.
        outputs: Where sampling leaves tokens and faults, and behind the tokens there is room for a number a row.
        synthetic: See Verifier.
    """

    def __init__(
        self,
        slots: SlotTable,
        most: int,
        mode: LogprobsMode,
        bitmasks: BitmaskBuffer,
        outputs: SampledOutputs,
        synthetic: SyntheticAcceptance | None = None,
    ) -> None:
        self._slots = slots
        self._mode: LogprobsMode = mode
        self._bitmasks = bitmasks
        self._outputs = outputs
        self._synthetic = synthetic
        self._most = slots.drafts.shape[1]
        self._asked = SamplingColumns(*(column.new_empty(most) for column in columns_of(slots)))
        self._rows = torch.arange(most, device=slots.device)
        self._look_up_tokens = kernel("look_up_tokens", slots.device.type)
        self._position_columns = kernel("position_columns", slots.device.type)
        self._verify_drafts = kernel("verify_drafts", slots.device.type)
        self._sample = kernel("sample", slots.device.type)

    def warm_up(self, logits: Tensor) -> None:
        """Run what verifies the logits [positions, vocab], which are the dummy's."""
        slots = torch.full((len(logits),), self._slots.dummy, dtype=torch.int64, device=logits.device)
        zeros = torch.zeros_like(slots)
        columns = DraftColumns(zeros, zeros - 1, zeros[:1])
        self._look_up(slots, columns)
        self._sample_all(logits, slots, columns, self._mode.startswith("processed"))
        self._keep(slots, columns, 0)
        self._slots.init_dummy()

    def verify_at_once(self, logits: Tensor, slots: Tensor, drafts: DraftColumns[Tensor]) -> None:
        """Sample all positions, and move the slots' lengths, last tokens and counters to what stays: by the slots'
        sampling parameters alone. Nothing is decided on the host, so a graph can capture this.

        Args:
            logits: [positions, vocab].
            slots: [positions] int64.
            drafts: Changed: those that only the device knows are put in place of what names them.
        """
        self._look_up(slots, drafts)
        self._sample_all(logits, slots, drafts, False)
        self._keep(slots, drafts, self._most)
        self._outputs.send()

    def begin(self, step: Step) -> None:
        """Decide whether the graph of a short step verifies, if that needs nothing of the host; any other step samples
        for the dummy in place of all positions, which are verified behind it. And what is reported of its tokens."""
        step.logprobs = self._slots.host.logprobs_request(step.slots, self._mode)
        step.verified_by_graph = step.shape is not None and step.shape.is_short and not self._needs_host(step)
        if not step.verified_by_graph:
            step.late, step.masked = np.arange(len(step.slots)), step.host.masked

    def _needs_host(self, step: Step) -> bool:
        """Whether the step's tokens depend on more than the slots' sampling parameters, or are reported as they are
        sampled."""
        given = len(step.host.masked) > 0 or self._synthetic is not None or step.keeps_scores
        return given or self._slots.transforms.any_active(step.slots)

    def verify(self, step: Step, logits: Tensor) -> StepHandle:
        """Sample, and move the slots' lengths, last tokens and counters to what stays; now, or behind bitmasks. Of a
        step that its graph has verified, launch the reports alone.

        Args:
            step: What `begin` was told; rows with logits transforms have no drafts.
            logits: [positions, vocab], or more with padding.
        """
        rows, positions = len(step.drafts.counts), len(step.slots)
        if step.verified_by_graph:
            assert step.shape is not None
            return self._reported(step, logits, step.shape.sampled, ({}, set()))
        assert step.late_columns is not None, "each sampled row has a position"
        slots, *others = torch.split(to_device_memory(step.late_columns), [positions] * 3 + [rows])
        drafts, logits = DraftColumns(*others), logits[:positions]
        if step.drafts.on_device:
            self._look_up(slots, drafts)
        if not len(step.masked):
            return self._finish(step, logits, logits, slots, drafts)

        def finish(masked: Step, own: Tensor) -> StepHandle:
            reached = drafts._replace(next_drafts=upload(masked.drafts.next_drafts, logits.device))
            return self._finish(masked, logits, own, slots, reached)

        return behind_bitmasks(step, logits, self._bitmasks, finish)

    def _finish(
        self, step: Step, logits: Tensor, own: Tensor, slots: Tensor, drafts: DraftColumns[Tensor]
    ) -> StepHandle:
        """Sample and report a step. `own` is what is sampled from: `logits`, less what bitmasks forbid."""
        number = len(step.slots)
        scores = self._sample_all(own, slots, drafts, step.keeps_scores)
        found = self._sample_transformed(step, own, scores, slots)
        if self._synthetic is not None and not len(step.masked):
            self._synthetic.falsify(self._outputs.tokens[:number], drafts.next_drafts, drafts.offsets)
        self._keep(slots, drafts, int(step.drafts.counts.max(initial=0)))
        self._outputs.send()
        return self._reported(step, logits if scores is None else scores, number, found)

    def _reported(
        self, step: Step, scores: Tensor, positions: int, found: tuple[dict[int, str], set[int]]
    ) -> StepHandle:
        """Launch the reports of a step of which `positions` were sampled, padding included; `found`: see
        `_sample_transformed`."""
        number, owners, request = len(step.slots), self._slots.host.owners[step.slots], step.logprobs
        tokens, faults = self._outputs.on_host()
        reported = request.launch(scores[:number], self._outputs.tokens[:number]) if request else None

        def logprobs() -> list[TokenLogprobs | None]:
            return [] if request is None or reported is None else request.collect(reported)

        gained = tokens[positions : positions + len(step.drafts.counts)]
        outputs = (tokens[:number], faults[:number], gained)
        return step.timer.stop(partial(self._result, step, outputs, found, owners, logprobs))

    def _look_up(self, slots: Tensor, drafts: DraftColumns[Tensor]) -> None:
        """Put drafts that only the device knows in place of what names them."""
        self._look_up_tokens(drafts.next_drafts, slots, self._slots.drafts, drafts.next_drafts)

    def _sample_all(
        self, logits: Tensor, slots: Tensor, drafts: DraftColumns[Tensor], keep_scores: bool
    ) -> Tensor | None:
        """Sample each position by its slot's parameters, and by the counter that its token has; returns [positions,
        vocab] scores, if they are kept."""
        number = len(slots)
        asked = SamplingColumns(*(column[:number] for column in self._asked))
        self._position_columns(slots, drafts.offsets, columns_of(self._slots), asked)
        thresholds = None
        if keep_scores:
            value = torch.empty_like(asked.temperature)
            thresholds = SamplingThresholds(value, torch.empty_like(slots))
        tokens, faults = self._outputs.tokens[:number], self._outputs.faults[:number]
        self._sample(logits, self._rows[:number], asked, tokens, faults, thresholds=thresholds)
        return None if thresholds is None else apply_thresholds(logits, asked.temperature, thresholds)

    def _sample_transformed(
        self, step: Step, logits: Tensor, scores: Tensor | None, slots: Tensor
    ) -> tuple[dict[int, str], set[int]]:
        """Sample once more the positions whose logits are changed; returns what went wrong, and which positions these
        are."""
        places = self._slots.transforms.are_active(step.slots).nonzero()[0]
        changed = {*places.tolist(), *step.masked.tolist()}
        if not len(places):
            return {}, changed
        at = upload(places, logits.device)
        found: Sampled = sample(
            logits.index_select(0, at), step.slots[places], self._slots, keep_scores=scores is not None,
            device_slots=slots.index_select(0, at),
        )  # fmt: skip
        self._outputs.tokens.index_copy_(0, at, found.tokens)
        self._outputs.faults.index_copy_(0, at, found.faults)
        if scores is not None and found.scores is not None:
            scores.index_copy_(0, at, found.scores)
        return {int(places[row]): text for row, text in found.broken.items()}, changed

    def _keep(self, slots: Tensor, drafts: DraftColumns[Tensor], most: int) -> None:
        table, outputs = self._slots, self._outputs
        self._verify_drafts(
            outputs.tokens, outputs.faults, drafts.next_drafts, drafts.ends, slots, most, table.length,
            table.last_token, table.num_sampled, table.recent, outputs.tokens[len(slots) :][: len(drafts.ends)],
        )  # fmt: skip

    def _result(
        self,
        step: Step,
        outputs: tuple[IntArray, npt.NDArray[np.int8], IntArray],
        found: tuple[dict[int, str], set[int]],
        owners: IntArray,
        logprobs: Callable[[], list[TokenLogprobs | None]],
        device_ms: float,
    ) -> Result:
        """The step's result from what the device has decided; `outputs` are tokens, faults and how many tokens each row
        gains."""
        drafts, host = step.drafts, self._slots.host
        verified = Verified(outputs[0].copy(), outputs[1].copy(), *found, None)
        gained = outputs[2].copy()
        failed = verified.failed(drafts, gained)
        unused = drafts.counts + 1 - np.maximum(gained, 1)
        same = (host.owners[step.slots] == owners)[drafts.first_positions]
        host.max_lengths[step.slots[drafts.first_positions]] -= np.where(same, unused, 0)
        kept = (drafts.offsets < gained[drafts.row_of_position]).nonzero()[0]
        entries = logprobs()
        own = [entries[place] for place in kept.tolist()] if entries else []
        return result_of(step, gained, verified.tokens[kept].tolist(), own, failed, device_ms)
