"""Log probabilities of sampled tokens and of prompts, together with the likeliest tokens or those that a request names.

They are launched on the device and collected on the host later, so that no step waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.logprobs import TokenScores
from quire.foundation.messages.workers import Plan, PromptLogprobsRow, TokenLogprobs
from quire.runtime.worker.host_memory import upload

if TYPE_CHECKING:
    from quire.models.model import Model
    from quire.runtime.worker.batch import Batch
    from quire.runtime.worker.host_batch import HostBatch
    from quire.runtime.worker.slot_table import SlotTable

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
SampledLogprobs = Callable[[], list[TokenLogprobs | None]]
"""Collects launched log probabilities once the device is done: an entry per sampled position, None if none is
wanted."""
PromptsLogprobs = Callable[[], list[list[TokenLogprobs]]]
"""Collects launched log probabilities once the device is done: a list for each row."""
NO_LOGPROBS = -1
UNSORTED_MOST = 64
"""Up to this many likeliest tokens are found without sorting a row of logits."""
SORTED_LOGITS = 2**24
"""Maximum logits that are sorted at a time, though never less than one row. Each takes about 50 bytes."""


def rows_at_once(vocab_size: int) -> int:
    """Return how many rows of logits are sorted at a time."""
    return max(1, SORTED_LOGITS // vocab_size)


class Scores(NamedTuple):
    """Scores and ranks of n tokens, and the k likeliest tokens at their positions.

    Attributes:
        own, ranks: [n] fp32 and int64.
        ids, values: [n, k] int64 and fp32, the likeliest tokens and their scores, best first.
    """

    own: Tensor
    ranks: Tensor
    ids: Tensor
    values: Tensor

    def to_host(self) -> Scores:
        """Start a copy to the host and return it. It is complete once the device's stream has run it."""
        return Scores(*(column.to("cpu", non_blocking=True) for column in self))


class LogprobsRequest:
    """The log probabilities that a step reports of its sampled tokens.

    Args:
        wanted: [sampled], how many likeliest tokens to report for each position, or NO_LOGPROBS. At least one position
            must want some.
        named: Tokens to report instead of the likeliest, by position.
        mode: `processed` scores are those that tokens were sampled from, `raw` ones the model's own; `logits` are not
            normalised.
    """

    def __init__(self, wanted: IntArray, named: Mapping[int, list[int]], mode: LogprobsMode) -> None:
        self._positions = (wanted != NO_LOGPROBS).nonzero()[0]
        self._wanted: list[int] = wanted[self._positions].tolist()
        self._number = len(wanted)
        self._mode = mode
        places = {position: place for place, position in enumerate(self._positions.tolist())}
        self._named = {places[position]: ids for position, ids in sorted(named.items())}  # by place in _positions

    @property
    def processed(self) -> bool:
        """Whether to report the scores that tokens were sampled from, instead of the model's own."""
        return self._mode.startswith("processed")

    def launch(self, logits: Tensor, tokens: Tensor) -> SampledLogprobs:
        """Compute what is reported, and start to copy it to the host.

        Args:
            logits: [sampled, vocab], or the scores that tokens were sampled from; may change afterwards.
            tokens: [sampled] int64, the sampled tokens.
        """
        rows = upload(self._positions, logits.device)
        own, vocab = tokens.index_select(0, rows), logits.shape[-1]
        wanted = [most for place, most in enumerate(self._wanted) if place not in self._named]
        most = min(max(wanted, default=0), vocab)
        each = len(rows) if most <= UNSORTED_MOST else rows_at_once(vocab)
        scores, bests, sums = [], [], []
        for some, theirs in zip(torch.split(rows, each), torch.split(own, each), strict=True):
            found = score(logits, some, theirs, most, normalise=self._mode.endswith("logprobs"))
            scores.append(Scores(*found[:4]).to_host())
            bests.append(found.best)
            sums.append(found.log_sum)
        if not self._named:
            return partial(self._collect, scores, torch.empty(0))
        named = self._of_named(logits, rows, torch.cat(bests), torch.cat(sums))
        return partial(self._collect, scores, named.to("cpu", non_blocking=True))

    def _collect(self, launched: list[Scores], named: Tensor) -> list[TokenLogprobs | None]:
        """Combine the scores of positions that want them with the scores of all named tokens, [named]."""
        entries: list[TokenLogprobs | None] = [None] * self._number
        values, end, place = named.tolist(), 0, 0
        for scores in launched:
            for entry in entries_of(scores, self._wanted[place : place + len(scores.own)]):
                if place in self._named:
                    ids = self._named[place]
                    end += len(ids)
                    entry = TokenLogprobs(entry.logprob, entry.rank, ids, values[end - len(ids) : end])
                entries[int(self._positions[place])] = entry
                place += 1
        return entries

    def _of_named(self, logits: Tensor, rows: Tensor, best: Tensor, log_sum: Tensor) -> Tensor:
        """Return the scores of all positions' named tokens in sequence, [n]."""
        counts = [len(ids) for ids in self._named.values()]
        places = upload(np.repeat(np.array(list(self._named), dtype=np.int64), counts), logits.device)
        tokens = upload([token for ids in self._named.values() for token in ids], logits.device)
        x = logits[rows.index_select(0, places), tokens].float()
        return (x - best.index_select(0, places)) - log_sum.index_select(0, places)


def score(logits: Tensor, rows: Tensor, tokens: Tensor, most: int, *, normalise: bool) -> TokenScores:
    """Run the op `token_logprobs` on the logits' device."""
    scores: TokenScores = kernel("token_logprobs", logits.device.type)(logits, rows, tokens, most, normalise=normalise)
    return scores


def entries_of(scores: Scores, wanted: list[int]) -> list[TokenLogprobs]:
    """Return entries of n tokens; `wanted` [n] is how many likeliest tokens to report for each."""
    own, ranks, ids, values = (column.tolist() for column in scores)
    return [TokenLogprobs(own[i], ranks[i], ids[i][:count], values[i][:count]) for i, count in enumerate(wanted)]


def scores_of(logits: Tensor, tokens: Tensor, most: int) -> Scores:
    """Return log probabilities of one token per row of logits [n, vocab], with the `most` likeliest tokens beside
    it."""
    every = torch.arange(len(tokens), device=tokens.device)
    found = score(logits, every, tokens, min(most, logits.shape[-1]), normalise=True)
    return Scores(*found[:4])


def warm_up_logprobs(logits: Tensor, tokens: Tensor, mode: LogprobsMode, most: int) -> None:
    """Run everything that reports log probabilities of `tokens` [n] int64 in logits [n, vocab], with the maximum memory
    that it takes. At most `most` tokens will be reported beside the sampled one."""
    rows = torch.arange(len(logits), device=logits.device)
    for normalise in {True, mode.endswith("logprobs")}:  # prompts are always reported as log probabilities
        score(logits, rows, tokens, 1, normalise=normalise)
    if most > UNSORTED_MOST:
        each = rows_at_once(logits.shape[-1])
        score(logits, rows[:each], tokens[:each], most, normalise=True)


class PromptLogprobs:
    """Log probabilities of a prompt's tokens, always the model's own. A chunk's logits are computed in slices of at
    most `positions` prompt positions, to bound their memory."""

    def __init__(self, model: Model, slots: SlotTable) -> None:
        self._model = model
        self._slots = slots
        self.positions = rows_at_once(slots.vocab_size)

    def launch(self, plan: Plan, host: HostBatch, batch: Batch, hidden: Tensor) -> PromptsLogprobs | None:
        """Launch the log probabilities of `plan.prompt_logprobs_rows` from `hidden` [tokens, hidden]; returns None if
        the plan has none."""
        if not plan.prompt_logprobs_rows:
            return None
        wanted = [self._slots.host.prompt_logprobs[plan.slots[each.row]] for each in plan.prompt_logprobs_rows]
        rows = zip(plan.prompt_logprobs_rows, wanted, strict=True)
        return partial(_collect_prompts, [self._row(each, host, batch, hidden, most) for each, most in rows], wanted)

    def warm_up(self, logits: Tensor, most: int) -> None:
        """Take the maximum memory of a slice, on logits [n, vocab] with any values. `most` is the maximum number of
        likeliest tokens."""
        if most > UNSORTED_MOST:
            scores_of(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device), most)

    def _row(self, row: PromptLogprobsRow, host: HostBatch, batch: Batch, hidden: Tensor, most: int) -> list[Scores]:
        first = int(host.first_tokens[row.row])
        start, end = first + row.skip, first + row.skip + row.count
        targets = batch.tokens[start + 1 : end + 1]
        if end == first + int(host.counts[row.row]):  # the chunk's last target is a token of the next step
            targets = torch.cat((batch.tokens[start + 1 : end], upload([row.next_token], targets.device)))
        return [
            scores_of(self._model.logits(hidden[at : min(end, at + self.positions)]), own, most).to_host()
            for at, own in zip(range(start, end, self.positions), torch.split(targets, self.positions), strict=True)
        ]


def _collect_prompts(slices: list[list[Scores]], wanted: list[int]) -> list[list[TokenLogprobs]]:
    """Return one list per row, with as many likeliest tokens as the row wants."""
    return [
        [entry for scores in row for entry in entries_of(scores, [most] * len(scores.own))]
        for row, most in zip(slices, wanted, strict=True)
    ]
