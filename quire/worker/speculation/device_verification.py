"""Verification on a device that runs ahead of the host: the same decisions as `verification.py`, without waiting.

All positions are sampled at once, a kernel moves the slots to what stays, and the host reads how many tokens that are
once they are there; it need not know the drafts. So the next step can be launched behind it. What a logits transform changes depends on
tokens before it, which only the device knows here: rows with transforms have no drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attention.metadata import IntArray
from quire.kernels.dispatch import kernel
from quire.kernels.reference.sample import SamplingColumns, SamplingThresholds, apply_thresholds
from quire.messages import Result, TokenBitmasks, TokenLogprobs
from quire.worker.pinned_memory import upload
from quire.worker.sampling.logprobs import LogprobsMode
from quire.worker.sampling.prompt_logprobs import StepPromptLogprobs
from quire.worker.sampling.sampled_outputs import SampledOutputs
from quire.worker.sampling.sampler import Sampled, columns_of, sample
from quire.worker.sampling.token_bitmasks import BitmaskBuffer
from quire.worker.slot_table import SlotTable
from quire.worker.speculation.synthetic_acceptance import SyntheticAcceptance
from quire.worker.speculation.verification import Verification, Verified, result_of, with_bitmasks
from quire.worker.staging_buffer import to_device_memory
from quire.worker.step_handle import MaskedStepHandle, StepHandle


class DraftColumns(NamedTuple):
    """A step's drafts on the device; all int64.

    Attributes:
        slots, offsets, next_drafts: [positions], see StepDrafts.
        ends: [sampled rows] where each row's positions end.
    """

    slots: Tensor
    offsets: Tensor
    next_drafts: Tensor
    ends: Tensor


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
        self._asked = SamplingColumns(*(column.new_empty(most) for column in columns_of(slots)))
        self._rows = torch.arange(most, device=slots.device)
        self._look_up_tokens = kernel("look_up_tokens", slots.device.type)
        self._position_columns = kernel("position_columns", slots.device.type)
        self._keep_drafts = kernel("keep_drafts", slots.device.type)
        self._sample = kernel("sample", slots.device.type)

    def warm_up(self, logits: Tensor) -> None:
        """Run what verifies so many positions, on logits [positions, vocab] of the dummy."""
        number = len(logits)
        slots = torch.full((number,), self._slots.dummy, dtype=torch.int64, device=logits.device)
        zeros = torch.zeros_like(slots)
        self._look_up(DraftColumns(slots, zeros, zeros, zeros))
        self._sample_all(logits, DraftColumns(slots, zeros, zeros, zeros), self._mode.startswith("processed"))
        one = torch.ones_like(zeros[:1])
        self._keep(DraftColumns(slots[:1], zeros[:1], zeros[:1] - 1, one), 0)
        self._slots.init_dummy()

    def verify(self, step: Verification, logits: Tensor, columns: Tensor, prompts: StepPromptLogprobs) -> StepHandle:
        """Sample, and move the slots' lengths, last tokens and counters to what stays; now, or behind bitmasks.

        Args:
            step: See there; rows with logits transforms have no drafts.
            logits: [positions, vocab].
            columns: `step.columns()` as the device reads them.
            prompts: The step's log probabilities of prompts.
        """
        rows, positions = len(step.drafts.counts), len(step.slots)
        on_device = DraftColumns(*torch.split(to_device_memory(columns), [positions] * 3 + [rows]))
        if step.drafts.on_device:
            self._look_up(on_device)
        if not len(step.masked):
            return self._finish(step, logits, logits, on_device, prompts)

        def verify_masked(masks: TokenBitmasks) -> StepHandle:
            assert masks.step == step.step, f"bitmasks of step {masks.step}, expected those of {step.step}"
            masked = with_bitmasks(step, masks)
            with torch.inference_mode():
                own = logits.clone()  # log probabilities are reported of what no mask has changed
                self._bitmasks.apply(own, upload(masked.masked, logits.device), masks.bits)
                reached = on_device._replace(next_drafts=upload(masked.drafts.next_drafts, logits.device))
                return self._finish(masked, logits, own, reached, prompts)

        return MaskedStepHandle(verify_masked, step.timer.wait)

    def _finish(
        self, step: Verification, logits: Tensor, own: Tensor, columns: DraftColumns, prompts: StepPromptLogprobs
    ) -> StepHandle:
        """`own` is what is sampled from: `logits`, less what bitmasks forbid."""
        number, host = len(step.slots), self._slots.host
        request = host.logprobs_request(step.slots, self._mode)
        scores = self._sample_all(own, columns, bool(request) and request.processed)
        found = self._sample_transformed(step, own, scores, columns)
        if self._synthetic is not None and not len(step.masked):
            self._synthetic.falsify(self._outputs.tokens[:number], columns.next_drafts, columns.offsets)
        self._keep(columns, int(step.drafts.counts.max(initial=0)))
        self._outputs.send()
        tokens, faults = self._outputs.on_host()
        reported = None
        if request:
            reported = request.launch(logits if scores is None else scores, self._outputs.tokens[:number])

        def logprobs() -> list[TokenLogprobs | None]:
            return [] if reported is None else request.collect(reported)

        return step.timer.stop(
            partial(self._result, step, tokens, faults, found, host.owners[step.slots].copy(), logprobs, prompts)
        )

    def _look_up(self, columns: DraftColumns) -> None:
        """Put drafts that only the device knows in place of what names them."""
        drafts = columns.next_drafts
        self._look_up_tokens(drafts, columns.slots, self._slots.drafts, drafts)

    def _sample_all(self, logits: Tensor, columns: DraftColumns, keep_scores: bool) -> Tensor | None:
        """Each position by its slot's parameters, and by the counter that its token has; [positions, vocab] scores."""
        number = len(columns.slots)
        asked = SamplingColumns(*(column[:number] for column in self._asked))
        self._position_columns(columns.slots, columns.offsets, columns_of(self._slots), asked)
        thresholds = None
        if keep_scores:
            value = torch.empty_like(asked.temperature)
            thresholds = SamplingThresholds(value, torch.empty_like(columns.slots))
        tokens, faults = self._outputs.tokens[:number], self._outputs.faults[:number]
        self._sample(logits, self._rows[:number], asked, tokens, faults, thresholds=thresholds)
        return None if thresholds is None else apply_thresholds(logits, asked.temperature, thresholds)

    def _sample_transformed(
        self, step: Verification, logits: Tensor, scores: Tensor | None, columns: DraftColumns
    ) -> tuple[dict[int, str], set[int]]:
        """The positions whose logits are changed, again; what went wrong, and which they are."""
        places = self._slots.transforms.are_active(step.slots).nonzero()[0]
        changed = {*places.tolist(), *step.masked.tolist()}
        if not len(places):
            return {}, changed
        at = upload(places, logits.device)
        found: Sampled = sample(
            logits.index_select(0, at), step.slots[places], self._slots, keep_scores=scores is not None,
            device_slots=columns.slots.index_select(0, at),
        )  # fmt: skip
        self._outputs.tokens.index_copy_(0, at, found.tokens)
        self._outputs.faults.index_copy_(0, at, found.faults)
        if scores is not None and found.scores is not None:
            scores.index_copy_(0, at, found.scores)
        return {int(places[row]): text for row, text in found.broken.items()}, changed

    def _keep(self, columns: DraftColumns, most: int) -> None:
        table, outputs = self._slots, self._outputs
        self._keep_drafts(
            outputs.tokens, outputs.faults, columns.next_drafts, columns.ends, columns.slots, most, table.length,
            table.last_token, table.num_sampled, table.recent, outputs.tokens[len(columns.slots) :][: len(columns.ends)],
        )  # fmt: skip

    def _result(
        self,
        step: Verification,
        tokens: IntArray,
        faults: npt.NDArray[np.int8],
        found: tuple[dict[int, str], set[int]],
        owners: IntArray,
        logprobs: Callable[[], list[TokenLogprobs | None]],
        prompts: StepPromptLogprobs,
        device_ms: float,
    ) -> Result:
        """Of what the device has decided."""
        number, drafts, host = len(step.slots), step.drafts, self._slots.host
        verified = Verified(tokens[:number].copy(), faults[:number].copy(), *found, None)
        gained = tokens[number : number + len(drafts.counts)].copy()
        failed = verified.failed(drafts, gained)
        unused = drafts.counts + 1 - np.maximum(gained, 1)
        same = (host.owners[step.slots] == owners)[drafts.first_positions]
        host.max_lengths[step.slots[drafts.first_positions]] -= np.where(same, unused, 0)
        kept = (drafts.offsets < gained[drafts.row_of_position]).nonzero()[0]
        entries = logprobs()
        own = [entries[place] for place in kept.tolist()] if entries else []
        return result_of(step, gained, verified.tokens[kept].tolist(), own, failed, prompts, device_ms)
