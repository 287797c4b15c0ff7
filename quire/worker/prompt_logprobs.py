"""Log probabilities of a prompt's tokens, each after what stands before it; always the model's own.

A chunk's logits are made a slice at a time, so that they never take more than a fixed room.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.messages import Plan, ScoredRow, TokenLogprobs
from quire.models.model import Model
from quire.worker.batch import Batch, HostBatch
from quire.worker.logprobs import entries_of

ROOM = 2**24
"""Logits of a slice, at most (but one row at least): 64 MB in fp32, twice that with their softmax."""


class PromptLogprobs:
    """Over one model's hidden states.

    Args:
        model: Makes the logits.
        vocab_size: Of each.
    """

    def __init__(self, model: Model, vocab_size: int) -> None:
        self._model = model
        self._slice = max(1, ROOM // vocab_size)  # positions

    def of(
        self, plan: Plan, host: HostBatch, batch: Batch, hidden: Tensor, wanted: list[int]
    ) -> list[list[TokenLogprobs]]:
        """One list for each of `plan.scored`.

        Args:
            host, batch: The plan's.
            hidden: [tokens, hidden].
            wanted: How many of the likeliest tokens to report, for each of `plan.scored`.
        """
        return [self._row(each, host, batch, hidden, k) for each, k in zip(plan.scored, wanted, strict=True)]

    def _row(
        self, scored: ScoredRow, host: HostBatch, batch: Batch, hidden: Tensor, wanted: int
    ) -> list[TokenLogprobs]:
        first = int(host.firsts[scored.row])
        start, end = first + scored.skip, first + scored.skip + scored.count
        targets = batch.tokens[start + 1 : end + 1]
        if end == first + int(host.counts[scored.row]):  # the last one's stands in no row of this step
            targets = torch.cat((batch.tokens[start + 1 : end], targets.new_tensor([scored.next])))
        entries: list[TokenLogprobs] = []
        while start < end:
            values = self._model.logits(hidden[start : min(end, start + self._slice)]).float().log_softmax(-1)
            entries += entries_of(values, targets[len(entries) : len(entries) + len(values)], [wanted] * len(values))
            start += len(values)
        return entries
