"""Which draft tokens stay: a token is sampled at each position as if there were no drafts, and a draft stays where it
is that token.

The random number of a position is the one that its token would have had anyway (`seed` and how many were sampled before
it), so the output is the same token for token whatever is proposed: drafts that nobody could have foreseen, fewer of
them under load, or none. Its distribution is that of plain sampling by construction. A draft is accepted with the
probability that the model gives it, which for a draft without alternatives is all that rejection sampling (Leviathan,
Kalman, Matias 2023) reaches. Samplers that share random numbers in this way are studied by Daliri, Musco, Suresh 2024,
"Coupling without Communication and Drafter-Invariant Speculative Decoding".

The host decides here, so this serves devices whose steps the host computes; `device_verification.py` serves others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.sample import SamplingColumns
from quire.foundation.messages.workers import Result, TokenBitmasks, TokenLogprobs
from quire.runtime.worker.host_memory import upload
from quire.runtime.worker.sampling.logprobs import LogprobsMode
from quire.runtime.worker.sampling.sampled_outputs import REFUSALS, errors_of
from quire.runtime.worker.sampling.sampler import columns_of, sample
from quire.runtime.worker.sampling.token_bitmasks import BitmaskBuffer
from quire.runtime.worker.slot_table import SlotTable
from quire.runtime.worker.speculation.step_drafts import StepDrafts
from quire.runtime.worker.speculation.synthetic_acceptance import SyntheticAcceptance
from quire.runtime.worker.step import Step
from quire.runtime.worker.step_handle import MaskedStepHandle, StepHandle


@dataclass(frozen=True)
class Verified:
    """What was sampled at the positions that were reached: those behind a row's first rejected draft were not.

    Attributes:
        tokens: [positions] int64.
        faults: [positions] int8.
        broken: See Sampled.
        transformed: Positions whose logits were changed.
        scores: [positions, vocab] what tokens were sampled from, if it is reported.
    """

    tokens: IntArray
    faults: npt.NDArray[np.int8]
    broken: dict[int, str]
    transformed: set[int]
    scores: Tensor | None

    def gains(self, drafts: StepDrafts) -> tuple[IntArray, Mapping[int, str]]:
        """How many tokens each sampled row gains, and what went wrong by sampled row: such a row gains none."""
        stays = (self.tokens == drafts.next_drafts) & (self.faults == 0)
        stays[list(self.broken)] = False
        ends = (~stays).nonzero()[0]
        gained: IntArray = ends[np.searchsorted(ends, drafts.first_positions)] - drafts.first_positions + 1
        return gained, self.failed(drafts, gained)

    def failed(self, drafts: StepDrafts, gained: IntArray) -> Mapping[int, str]:
        """What went wrong at the last token that a row gains, by sampled row. Such a row gains none: its entry in
        `gained` [sampled rows] is set to 0."""
        errors = errors_of(self.faults, self.broken, self.transformed)
        if not errors:
            return {}
        last = drafts.first_positions + gained - 1
        failed = {row: errors[place] for row, place in enumerate(last.tolist()) if place in errors}
        gained[list(failed)] = 0
        return failed


class Verifier:
    """Verifies drafts for the slots of a table.

    Args:
        slots: The table.
        mode: What is reported.
        bitmasks: Where masks of a step are kept.
        synthetic: Decides in place of the model which drafts stay; None: the model does. Steps with masks have none.
    """

    def __init__(
        self,
        slots: SlotTable,
        mode: LogprobsMode,
        bitmasks: BitmaskBuffer,
        synthetic: SyntheticAcceptance | None = None,
    ) -> None:
        self._slots = slots
        self._mode: LogprobsMode = mode
        self._bitmasks = bitmasks
        self._synthetic = synthetic
        self._sample = kernel("sample", slots.device.type)

    def begin(self, step: Step) -> None:
        """Decide that the step stops at its logits, and what is reported of its tokens."""
        step.stops_at_logits = True
        step.late, step.masked = np.arange(len(step.slots)), step.host.masked
        step.logprobs = self._slots.host.logprobs_request(step.slots, self._mode)

    def verify(self, step: Step, logits: Tensor) -> StepHandle:
        """Sample, and move the slots' lengths, last tokens and counters to what stays; now, or once bitmasks are there.

        Args:
            step: What `begin` was told.
            logits: [positions, vocab].
        """
        if not len(step.masked):
            return self._finish(step, logits, logits)
        return behind_bitmasks(step, logits, self._bitmasks, lambda masked, own: self._finish(masked, logits, own))

    def _finish(self, step: Step, logits: Tensor, own: Tensor) -> StepHandle:
        """Verify and report a step. `own` is what is sampled from: `logits`, less what bitmasks forbid."""
        verified = self._verify(step, own)
        gained, failed = verified.gains(step.drafts)
        self._move_slots(step.drafts, step.slots, verified.tokens, gained)
        drafts = step.drafts
        kept = (drafts.offsets < gained[drafts.row_of_position]).nonzero()[0]
        scores = logits if verified.scores is None else verified.scores
        logprobs = self._logprobs(scores, step.slots[kept], kept, verified.tokens[kept]) if step.logprobs else []
        return step.timer.stop(partial(result_of, step, gained, verified.tokens[kept].tolist(), logprobs, failed))

    def _verify(self, step: Step, logits: Tensor) -> Verified:
        """Sample all positions at once, but those where what is sampled changes the logits of the next."""
        number, drafts, keep_scores = len(step.slots), step.drafts, step.keeps_scores
        verified = Verified(
            np.zeros(number, dtype=np.int64), np.zeros(number, dtype=np.int8), {}, set(step.masked.tolist()),
            torch.zeros(logits.shape, dtype=torch.float32) if keep_scores else None,
        )  # fmt: skip
        slots = step.slots[drafts.first_positions]
        one_by_one = np.ones(len(slots), dtype=np.bool_) if keep_scores else self._slots.transforms.are_active(slots)
        plain = (~one_by_one[drafts.row_of_position]).nonzero()[0]
        if len(plain):
            self._sample_at_once(verified, logits, step.slots, drafts, plain)
            self._falsify(verified, step, plain)
        if len(plain) < number:
            self._sample_one_by_one(verified, logits, step, one_by_one.nonzero()[0])
        return verified

    def _sample_at_once(
        self, verified: Verified, logits: Tensor, slots: IntArray, drafts: StepDrafts, positions: IntArray
    ) -> None:
        """Sample these positions, each by its slot's parameters and by the counter that its token has."""
        where = torch.from_numpy(slots[positions])
        columns = SamplingColumns(*(column.index_select(0, where) for column in columns_of(self._slots)))
        columns.drawn.add_(torch.from_numpy(drafts.offsets[positions]))
        own = logits if len(positions) == len(logits) else logits.index_select(0, torch.from_numpy(positions))
        tokens, faults = torch.empty_like(where), torch.empty(len(where), dtype=torch.int8)
        self._sample(own, torch.arange(len(where)), columns, tokens, faults)
        verified.tokens[positions], verified.faults[positions] = tokens.numpy(), faults.numpy()

    def _sample_one_by_one(self, verified: Verified, logits: Tensor, step: Step, rows: IntArray) -> None:
        """Sample the rows' first positions, then the second ones of those whose first draft stays, and so on: logits
        transforms go by the tokens before."""
        counters, drafts = self._slots.num_sampled, step.drafts
        before = counters.clone()
        places = drafts.first_positions[rows]
        while len(places):
            at, slots = torch.from_numpy(places), step.slots[places]
            where = torch.from_numpy(slots)
            found = sample(
                logits.index_select(0, at), slots, self._slots, keep_scores=verified.scores is not None,
                device_slots=where,
            )  # fmt: skip
            verified.tokens[places], verified.faults[places] = found.tokens.numpy(), found.faults.numpy()
            verified.broken.update({int(places[row]): text for row, text in found.broken.items()})
            self._falsify(verified, step, places)
            verified.transformed.update(places[list(found.transformed)].tolist())
            if verified.scores is not None and found.scores is not None:
                verified.scores.index_copy_(0, at, found.scores)
            counters.index_add_(0, where, torch.ones_like(where))
            stays = (verified.tokens[places] == drafts.next_drafts[places]) & (verified.faults[places] == 0)
            stays &= np.array([place not in verified.broken for place in places.tolist()], dtype=np.bool_)
            places = places[stays] + 1
        counters.copy_(before)

    def _falsify(self, verified: Verified, step: Step, positions: IntArray) -> None:
        if self._synthetic is None or len(step.masked):
            return
        tokens = torch.from_numpy(verified.tokens[positions])
        drafts, offsets = (each[positions] for each in (step.drafts.next_drafts, step.drafts.offsets))
        self._synthetic.falsify(tokens, torch.from_numpy(drafts), torch.from_numpy(offsets))
        verified.tokens[positions] = tokens.numpy()

    def _move_slots(self, drafts: StepDrafts, slots: IntArray, tokens: IntArray, gained: IntArray) -> None:
        """Move the slots, which have moved by all drafts before, back to what the rows gain. Of a row that failed
        nothing matters."""
        table, own = self._slots, slots[drafts.first_positions]
        last = tokens[drafts.first_positions + np.maximum(gained, 1) - 1]
        unused = drafts.counts + 1 - np.maximum(gained, 1)
        where = torch.from_numpy(own)
        table.last_token.index_copy_(0, where, torch.from_numpy(last))
        table.num_sampled.index_add_(0, where, torch.from_numpy(gained))
        table.length.index_add_(0, where, torch.from_numpy(-unused))
        table.host.max_lengths[own] -= unused

    def _logprobs(
        self, scores: Tensor, slots: IntArray, kept: IntArray, tokens: IntArray
    ) -> list[TokenLogprobs | None]:
        """The log probabilities that are reported, one entry for each token that is gained."""
        request = self._slots.host.logprobs_request(slots, self._mode)
        if not request:
            return []
        own = scores.index_select(0, torch.from_numpy(kept))
        return request.collect(request.launch(own, torch.from_numpy(tokens)))


def behind_bitmasks(
    step: Step, logits: Tensor, bitmasks: BitmaskBuffer, finish: Callable[[Step, Tensor], StepHandle]
) -> MaskedStepHandle:
    """Verify a step once its bitmasks are there: `finish` is given the step as they let it be, and the logits
    [positions, vocab] less what they forbid."""

    def verify(masks: TokenBitmasks) -> StepHandle:
        assert masks.step == step.number, f"bitmasks of step {masks.step}, expected those of {step.number}"
        masked = with_bitmasks(step, masks)
        with torch.inference_mode():
            own = logits.clone()  # log probabilities are reported of what no mask has changed
            bitmasks.apply(own, upload(masked.masked, logits.device), masks.bits)
            return finish(masked, own)

    return MaskedStepHandle(verify, step.timer.wait)


def with_bitmasks(step: Step, masks: TokenBitmasks) -> Step:
    """The step as these bitmasks let it be: a position without one is not reached, so the draft before it cannot
    stay."""
    counts = np.array(masks.counts or [1] * len(masks.rows), dtype=np.int64)
    places = np.arange(int(counts.sum())) - (counts.cumsum() - counts).repeat(counts)
    drafts = step.drafts.up_to(step.drafts.row_of_position[step.masked], counts - 1)
    return replace(step, drafts=drafts, masked=step.masked.repeat(counts) + places)


def result_of(
    step: Step,
    gained: IntArray,
    tokens: list[int],
    logprobs: list[TokenLogprobs | None],
    failed: Mapping[int, str],
    device_ms: float,
) -> Result:
    """The step's result, made of these columns."""
    return Result(
        step.number, gained.tolist(), tokens, logprobs, list(failed.items()), device_ms,
        step.prompts.collect() if step.prompts else [],
        drafted=step.drafts.counts.tolist(), refused=[row for row, text in failed.items() if text in REFUSALS],
    )  # fmt: skip
