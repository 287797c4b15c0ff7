"""Log probabilities of a prompt's tokens, each after what stands before it; always the model's own.

A chunk's logits are computed slice by slice, so that their memory is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.foundation.messages.workers import Plan, PromptLogprobsRow, TokenLogprobs
from quire.models.model import Model
from quire.runtime.worker.batch import Batch
from quire.runtime.worker.host_batch import HostBatch
from quire.runtime.worker.host_memory import upload
from quire.runtime.worker.sampling.logprobs import UNSORTED_MOST, Scores, entries_of, rows_at_once, scores_of
from quire.runtime.worker.slot_table import SlotTable


class PromptLogprobs:
    """Over one model's hidden states.

    Args:
        model: Makes the logits.
        slots: Of the sequences.

    Attributes:
        positions: Prompt positions of a slice, at most.
    """

    def __init__(self, model: Model, slots: SlotTable) -> None:
        self._model = model
        self._slots = slots
        self.positions = rows_at_once(slots.vocab_size)

    def launch(self, plan: Plan, host: HostBatch, batch: Batch, hidden: Tensor) -> StepPromptLogprobs | None:
        """Launch the log probabilities of `plan.prompt_logprobs_rows`; they can be collected once the device is done.
        Returns None where the plan has none.

        Args:
            plan: Which rows and positions.
            host, batch: The plan's.
            hidden: [tokens, hidden].
        """
        if not plan.prompt_logprobs_rows:
            return None
        wanted = [self._slots.host.prompt_logprobs[plan.slots[each.row]] for each in plan.prompt_logprobs_rows]
        rows = zip(plan.prompt_logprobs_rows, wanted, strict=True)
        return StepPromptLogprobs([self._row(each, host, batch, hidden, most) for each, most in rows], wanted)

    def warm_up(self, logits: Tensor, most: int) -> None:
        """Take the memory that a slice takes at most.

        Args:
            logits: [n, vocab], any, as many as a slice has.
            most: How many of the likeliest tokens may be wanted.
        """
        if most > UNSORTED_MOST:
            scores_of(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device), most)

    def _row(self, row: PromptLogprobsRow, host: HostBatch, batch: Batch, hidden: Tensor, most: int) -> list[Scores]:
        """Launch the scores of one row, slice by slice."""
        first = int(host.first_tokens[row.row])
        start, end = first + row.skip, first + row.skip + row.count
        targets = batch.tokens[start + 1 : end + 1]
        if end == first + int(host.counts[row.row]):  # the chunk's last target is a token of the next step
            targets = torch.cat((batch.tokens[start + 1 : end], upload([row.next_token], targets.device)))
        return [
            scores_of(self._model.logits(hidden[at : min(end, at + self.positions)]), own, most).to_host()
            for at, own in zip(range(start, end, self.positions), torch.split(targets, self.positions), strict=True)
        ]


class StepPromptLogprobs:
    """A step's log probabilities of prompts.

    Args:
        slices: For each row, its scores on the host, there once the device is done.
        wanted: How many of the likeliest tokens to report for each row.
    """

    def __init__(self, slices: Sequence[Sequence[Scores]], wanted: Sequence[int]) -> None:
        self._slices = slices
        self._wanted = wanted

    def collect(self) -> list[list[TokenLogprobs]]:
        """The log probabilities that were launched, one list for each row."""
        return [
            [entry for scores in row for entry in entries_of(scores, [most] * len(scores.own))]
            for row, most in zip(self._slices, self._wanted, strict=True)
        ]
