"""Decides which draft tokens are accepted: each position samples as if there were no drafts, and a draft is accepted if
it equals the token sampled there.

A position draws the random number that its token would have had without drafts (from `seed` and the number of tokens
sampled before it). So the output is the same token for token, whatever is proposed, and its distribution is that of
plain sampling. A draft is accepted with the probability that the model gives it, the best that rejection sampling
(Leviathan, Kalman, Matias 2023) reaches for one draft without alternatives. Daliri, Musco, Suresh 2024, "Coupling
without Communication and Drafter-Invariant Speculative Decoding", study samplers that share random numbers in this way.

The op `verify_drafts` decides on the device, so the next step can be launched without waiting. The host reads
afterwards how many tokens each row gained, and need not know the drafts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.sample import UNSOUND, SamplingColumns, SamplingThresholds, apply_thresholds
from quire.foundation.messages.workers import Result, TokenBitmasks
from quire.runtime.worker.host_memory import upload
from quire.runtime.worker.sampling.logprobs import LogprobsMode
from quire.runtime.worker.sampling.sampled_outputs import NOTHING_LEFT_TEXT, SampledOutputs, errors_of
from quire.runtime.worker.sampling.sampler import columns_of, sample_with_transforms
from quire.runtime.worker.sampling.token_bitmasks import BitmaskBuffer
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.speculation.draft_states import DraftStates
from quire.runtime.worker.speculation.step_drafts import DraftColumns, StepDrafts, draft_columns
from quire.runtime.worker.speculation.synthetic_acceptance import SyntheticAcceptance
from quire.runtime.worker.staging_buffer import to_device_memory
from quire.runtime.worker.step import NO_POSITIONS, Step
from quire.runtime.worker.step_handle import MaskedStepHandle, StepHandle


class _Changed(NamedTuple):
    """What the host knows about positions whose logits were changed before sampling: their indices, and the errors of
    logits processors by position."""

    positions: set[int]
    broken: dict[int, str]


class Verifier:
    """Verifies drafts for the slots of a table.

    Args:
        most: Maximum positions of a step.
        outputs: Receives tokens and faults. Its column of tokens also has an entry per row, for the number of tokens
            gained.
        synthetic: Decides in place of the model which drafts are accepted, except in steps with bitmasks; None: the
            model decides.
        states: The states of sequences, in a model whose layers keep any.
        runs_ahead: Whether steps are only launched, and graphs of short steps verify.
    """

    def __init__(
        self,
        slots: SlotTable,
        most: int,
        mode: LogprobsMode,
        bitmasks: BitmaskBuffer,
        outputs: SampledOutputs,
        synthetic: SyntheticAcceptance | None = None,
        states: DraftStates | None = None,
        *,
        runs_ahead: bool = False,
    ) -> None:
        self._slots = slots
        self._on_cpu = slots.device.type == "cpu"
        self._mode: LogprobsMode = mode
        self._bitmasks = bitmasks
        self._outputs = outputs
        self._synthetic = synthetic
        self._states = states
        self._runs_ahead = runs_ahead
        self._asked = SamplingColumns(*(column.new_empty(most) for column in columns_of(slots)))
        self._positions = torch.arange(most, device=slots.device)
        self._look_up_tokens = kernel("look_up_tokens", slots.device.type)
        self._position_columns = kernel("position_columns", slots.device.type)
        self._verify_drafts = kernel("verify_drafts", slots.device.type)
        self._sample = kernel("sample", slots.device.type)

    def warm_up(self, logits: Tensor) -> None:
        """Run all kernels of verification on the dummy slot's logits [positions, vocab]."""
        slots = torch.full((len(logits),), self._slots.dummy, dtype=torch.int64, device=logits.device)
        zeros = torch.zeros_like(slots)
        columns = DraftColumns(zeros, zeros - 1, zeros[:1])
        self._look_up(slots, columns)
        self._sample_positions(logits, slots, columns, keep_scores=self._mode.startswith("processed"))
        self._move_slots(slots, columns)
        self._slots.init_dummy()

    def verify_at_once(self, logits: Tensor, slots: Tensor, drafts: DraftColumns) -> None:
        """Sample all positions by the slots' sampling parameters alone, and advance the slots by the accepted tokens.
        The host decides nothing, so a graph can capture this.

        Args:
            logits: [positions, vocab].
            slots: [positions] int64.
            drafts: Changed in place: tokens replace the names of drafts that only the device knows.
        """
        self._look_up(slots, drafts)
        self._sample_positions(logits, slots, drafts)
        self._move_slots(slots, drafts)
        self._outputs.send()

    def begin(self, step: Step) -> None:
        """Decide how the step verifies, and which log probabilities are reported.

        On a CPU a step stops at its logits. On a device that runs ahead, the graph of a short step verifies if it needs
        nothing from the host. The graph of any other step samples into the dummy slot, and `verify` samples afterwards.
        """
        step.logprobs = self._slots.host.logprobs_request(step.slots, self._mode)
        step.stops_at_logits = not self._runs_ahead
        needs_host = len(step.host.masked) > 0 or self._synthetic is not None or step.keeps_scores
        may = self._runs_ahead and step.shape is not None and step.shape.is_short and not needs_host
        step.verified_by_graph = may and not self._slots.transforms.any_active(step.slots)
        if not step.verified_by_graph:
            step.late, step.masked = np.arange(len(step.slots)), step.host.masked

    def verify(self, step: Step, logits: Tensor) -> StepHandle:
        """Sample, and advance the slots by the accepted tokens: now, or once bitmasks are there. If the step's graph
        has verified, only the reports are launched.

        Args:
            step: The step that `begin` was given, once it is launched. On a device that runs ahead, rows with logits
                transforms have no drafts, because a transform depends on earlier tokens, which only the device knows.
            logits: [positions, vocab], or more with padding.
        """
        rows, positions = len(step.drafts.counts), len(step.slots)
        if step.verified_by_graph:
            assert step.shape is not None
            return self._report(step, logits, step.shape.sampled, _Changed(set(), {}))
        if step.late_columns is None:  # where the host computes
            slots, *others = map(torch.from_numpy, (step.slots, *draft_columns(step.drafts)))
        else:
            slots, *others = torch.split(to_device_memory(step.late_columns), [positions] * 3 + [rows])
        drafts, logits = DraftColumns(*others), logits[:positions]
        if step.drafts.on_device:
            self._look_up(slots, drafts)
        if not len(step.masked):
            return self._finish(step, logits, logits, slots, drafts)

        def finish(masks: TokenBitmasks) -> StepHandle:
            assert masks.step == step.number, f"bitmasks of step {masks.step}, expected those of {step.number}"
            masked = _with_bitmasks(step, masks)
            reached = drafts._replace(next_drafts=upload(masked.drafts.next_drafts, logits.device))
            with torch.inference_mode():
                own = logits.clone()  # log probabilities are reported of what no mask has changed
                self._bitmasks.apply(own, upload(masked.masked, logits.device), masks.bits)
                return self._finish(masked, logits, own, slots, reached)

        return MaskedStepHandle(finish, step.timer.wait)

    def _finish(self, step: Step, logits: Tensor, own: Tensor, slots: Tensor, drafts: DraftColumns) -> StepHandle:
        """Sample and report a step. `own` are the logits to sample from, after bitmasks."""
        one_by_one = self._slots.transforms.are_active(step.slots)
        if step.keeps_scores and self._on_cpu:  # scores take long: only those of positions that are reached are made
            one_by_one[:] = True
        scores = self._sample_positions(own, slots, drafts, one_by_one.nonzero()[0], keep_scores=step.keeps_scores)
        self._falsify(step, drafts, slice(len(slots)))
        changed = self._sample_one_by_one(one_by_one, step, own, scores, slots, drafts)
        self._move_slots(slots, drafts)
        self._outputs.send()
        if self._states is not None:
            self._states.settle(step, self._outputs.on_host()[0][len(slots) :][: len(step.drafts.counts)])
        return self._report(step, logits if scores is None else scores, len(slots), changed)

    def _look_up(self, slots: Tensor, drafts: DraftColumns) -> None:
        """Replace the names of drafts that only the device knows by their tokens."""
        self._look_up_tokens(drafts.next_drafts, slots, self._slots.drafts, drafts.next_drafts)

    def _sample_positions(
        self,
        logits: Tensor,
        slots: Tensor,
        drafts: DraftColumns,
        one_by_one: IntArray = NO_POSITIONS,
        *,
        keep_scores: bool = False,
    ) -> Tensor | None:
        """Sample each position by its slot's parameters and its token's counter; returns scores [positions, vocab] if
        they are kept. Results at positions in `one_by_one` are meaningless, because these are sampled
        later."""
        number = len(slots)
        tokens, faults = self._outputs.tokens[:number], self._outputs.faults[:number]
        if len(one_by_one) == number:
            tokens.zero_()
            faults.zero_()
            return torch.empty_like(logits, dtype=torch.float32) if keep_scores else None
        asked = SamplingColumns(*(column[:number] for column in self._asked))
        self._position_columns(slots, drafts.offsets, columns_of(self._slots), asked)
        if len(one_by_one):
            asked.temperature.index_fill_(0, upload(one_by_one, slots.device), 0.0)  # which takes least
        thresholds = None
        if keep_scores:
            thresholds = SamplingThresholds(torch.empty_like(asked.temperature), torch.empty_like(slots))
        self._sample(logits, self._positions[:number], asked, tokens, faults, thresholds=thresholds)
        return None if thresholds is None else apply_thresholds(logits, asked.temperature, thresholds)

    def _sample_one_by_one(
        self,
        one_by_one: npt.NDArray[np.bool_],
        step: Step,
        logits: Tensor,
        scores: Tensor | None,
        slots: Tensor,
        drafts: DraftColumns,
    ) -> _Changed:
        """Sample rows with logits transforms position by position, because a transform needs the token before. A row
        continues while its drafts are accepted."""
        table, outputs = self._slots, self._outputs
        first = step.drafts.first_positions
        rows = one_by_one[first].nonzero()[0]
        changed = _Changed(set(step.masked.tolist()), {})
        places, goes_on = first[rows], bool(step.drafts.counts[rows].any())
        before = table.num_sampled.clone() if goes_on else None
        while len(places):
            at = upload(places, logits.device)
            where = slots.index_select(0, at)
            found = sample_with_transforms(
                logits.index_select(0, at), step.slots[places], table, keep_scores=scores is not None,
                device_slots=where,
            )  # fmt: skip
            outputs.tokens.index_copy_(0, at, found.tokens)
            outputs.faults.index_copy_(0, at, found.faults)
            if scores is not None and found.scores is not None:
                scores.index_copy_(0, at, found.scores)
            changed.positions.update(places[list(found.transformed)].tolist())
            changed.broken.update({int(places[row]): text for row, text in found.broken.items()})
            if found.broken:  # no draft stays behind one
                outputs.faults.index_fill_(0, at[upload(list(found.broken), logits.device)], UNSOUND)
            if not goes_on:
                break
            self._falsify(step, drafts, at)
            table.num_sampled.index_add_(0, where, torch.ones_like(where))
            tokens, faults, own = (
                each.numpy()[places] for each in (outputs.tokens, outputs.faults, drafts.next_drafts)
            )
            places = places[(tokens == own) & (faults == 0)] + 1
        if before is not None:
            table.num_sampled.copy_(before)
        return changed

    def _falsify(self, step: Step, drafts: DraftColumns, at: Tensor | slice) -> None:
        """Let random numbers decide which drafts are accepted at these positions, if they replace the model."""
        if self._synthetic is None or len(step.masked):
            return
        tokens = self._outputs.tokens[at]
        self._synthetic.falsify(tokens, drafts.next_drafts[at], drafts.offsets[at])
        self._outputs.tokens[at] = tokens

    def _move_slots(self, slots: Tensor, drafts: DraftColumns) -> None:
        """Take back the tokens that rows do not gain: `BatchBuffers.prepare` has advanced each slot by all its
        drafts."""
        table, outputs = self._slots, self._outputs
        self._verify_drafts(
            outputs.tokens, outputs.faults, drafts.next_drafts, drafts.ends, slots, table.length, table.last_token,
            table.num_sampled, table.recent, outputs.tokens[len(slots) :][: len(drafts.ends)],
        )  # fmt: skip

    def _report(self, step: Step, scores: Tensor, positions: int, changed: _Changed) -> StepHandle:
        """Launch the reports of a step all of whose positions are sampled. A row fails by the last token that it gains,
        and keeps the drafts before."""
        number, owners, request = len(step.slots), self._slots.host.owners[step.slots], step.logprobs
        tokens, faults = self._outputs.on_host()
        gained = tokens[positions : positions + len(step.drafts.counts)]
        at, scores, sampled = np.arange(number), scores[:number], self._outputs.tokens[:number]
        if request is not None and self._on_cpu:  # which positions stay is known already
            at = _kept(step.drafts, gained)
            request = self._slots.host.logprobs_request(step.slots[at], self._mode)
            scores, sampled = scores[torch.from_numpy(at)], sampled[torch.from_numpy(at)]
        reported = request.launch(scores, sampled) if request else None

        def result(device_ms: float) -> Result:
            self._take_back(step, owners, gained)
            errors = errors_of(faults[:number], changed.broken, changed.positions)
            last = (step.drafts.first_positions + gained - 1).tolist() if errors else []
            failed = {row: errors[place] for row, place in enumerate(last) if place in errors}
            counts = gained.copy()
            counts[list(failed)] -= 1
            kept = _kept(step.drafts, counts)
            entries = {} if reported is None else dict(zip(at.tolist(), reported(), strict=True))
            return Result(
                step.number, counts.tolist(), tokens[kept].tolist(),
                [entries[place] for place in kept.tolist()] if entries else [], list(failed.items()), device_ms,
                step.prompt_logprobs(), drafted=step.drafts.counts.tolist(),
                refused=[row for row, text in failed.items() if text == NOTHING_LEFT_TEXT],
            )  # fmt: skip

        return step.timer.stop(result)

    def _take_back(self, step: Step, owners: IntArray, gained: IntArray) -> None:
        """Lower the maximum lengths of slots that gained fewer tokens than they might have, unless the slot has a new
        owner since `owners` [positions] were noted."""
        host, first = self._slots.host, step.drafts.first_positions
        same = (host.owners[step.slots] == owners)[first]
        host.max_lengths[step.slots[first]] -= np.where(same, step.drafts.counts + 1 - gained, 0)


def _kept(drafts: StepDrafts, gained: IntArray) -> IntArray:
    """Return the positions whose tokens are gained."""
    kept: IntArray = (drafts.offsets < gained[drafts.row_of_position]).nonzero()[0]
    return kept


def _with_bitmasks(step: Step, masks: TokenBitmasks) -> Step:
    """Return the step with only the drafts that the bitmasks allow: a position without a bitmask is not reached, so the
    draft before it cannot be accepted."""
    counts = np.array(masks.counts or [1] * len(masks.rows), dtype=np.int64)
    places = np.arange(int(counts.sum())) - (counts.cumsum() - counts).repeat(counts)
    drafts = step.drafts.up_to(step.drafts.row_of_position[step.masked], counts - 1)
    return replace(step, drafts=drafts, masked=step.masked.repeat(counts) + places)
