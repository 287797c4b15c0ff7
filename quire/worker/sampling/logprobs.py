"""Log probabilities of tokens and of others beside them: the likeliest ones, or those that were named.

Launched on the device and collected on the host later, so that no step waits for them. Knows nothing about how a token
was drawn, nor whether its logits are the model's own or what sampling made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.dispatch import kernel
from quire.kernels.reference.logprobs import TokenScores
from quire.messages import TokenLogprobs
from quire.worker.pinned_memory import upload

Ints = npt.NDArray[np.int64]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
NO_LOGPROBS = -1


ROOM = 2**24
"""Logits that are looked at at a time where many of each row are wanted, at most (but one row at least): sorting them
takes some 50 bytes each."""
FEW = 64
"""So many of a row are found without sorting it."""


def rows_at_once(vocab_size: int) -> int:
    """Of logits, where many of each are wanted."""
    return max(1, ROOM // vocab_size)


class Scores(NamedTuple):
    """Of n tokens.

    Attributes:
        own: [n] fp32.
        ranks: [n] int64.
        ids: [n, k] int64, the likeliest, best first.
        values: [n, k] fp32.
    """

    own: Tensor
    ranks: Tensor
    ids: Tensor
    values: Tensor

    def to_host(self) -> Scores:
        """The same on the host; there once the stream has come so far."""
        return Scores(*(column.to("cpu", non_blocking=True) for column in self))


class Reported(NamedTuple):
    """Of the reads of a step, on the host; there once the stream has come so far.

    Attributes:
        scores: Some reads after others.
        named: [] or more, fp32: of the tokens that were named, one after another.
    """

    scores: list[Scores]
    named: Tensor


class Reports:
    """Of the reads of a step that want them.

    Args:
        wanted: [reads] number of likeliest tokens to report for each read, or NO_LOGPROBS.
        named: Tokens to report in place of these, by read.
        mode: `processed` is what tokens were drawn from, `raw` what the model said; `logits` are reported as they are.
    """

    def __init__(self, wanted: Ints, named: Mapping[int, list[int]], mode: LogprobsMode) -> None:
        self._reads = (wanted != NO_LOGPROBS).nonzero()[0]
        self._wanted: list[int] = wanted[self._reads].tolist()
        self._number = len(wanted)
        self._mode = mode
        places = {read: at for at, read in enumerate(self._reads.tolist())}
        self._named = {places[read]: ids for read, ids in sorted(named.items())}  # by place among the asking

    def __bool__(self) -> bool:
        return bool(len(self._reads))

    @property
    def processed(self) -> bool:
        """Whether what tokens were drawn from is to be seen, and not what the model said."""
        return self._mode.startswith("processed")

    def launch(self, logits: Tensor, tokens: Tensor) -> Reported:
        """What is reported, on its way to the host.

        Args:
            logits: [reads, vocab], or what tokens were drawn from; may change afterwards.
            tokens: [reads] int64, the drawn ones.
        """
        reads = upload(self._reads, logits.device)
        own, vocab = tokens.index_select(0, reads), logits.shape[-1]
        wanted = [most for place, most in enumerate(self._wanted) if place not in self._named]
        most = min(max(wanted, default=0), vocab)
        each = len(reads) if most <= FEW else rows_at_once(vocab)
        scores, bests, sums = [], [], []
        for some, theirs in zip(torch.split(reads, each), torch.split(own, each), strict=True):
            found = score(logits, some, theirs, most, normalise=self._mode.endswith("logprobs"))
            scores.append(Scores(*found[:4]).to_host())
            bests.append(found.best)
            sums.append(found.log_sum)
        if not self._named:
            return Reported(scores, torch.empty(0))
        named = self._of_named(logits, reads, torch.cat(bests), torch.cat(sums))
        return Reported(scores, named.to("cpu", non_blocking=True))

    def collect(self, reported: Reported) -> list[TokenLogprobs | None]:
        """One entry a read, None where it was not asked for; what was reported is there."""
        entries: list[TokenLogprobs | None] = [None] * self._number
        values, end, place = reported.named.tolist(), 0, 0
        for scores in reported.scores:
            for entry in entries_of(scores, self._wanted[place : place + len(scores.own)]):
                if place in self._named:
                    ids = self._named[place]
                    end += len(ids)
                    entry = TokenLogprobs(entry.logprob, entry.rank, ids, values[end - len(ids) : end])
                entries[int(self._reads[place])] = entry
                place += 1
        return entries

    def _of_named(self, logits: Tensor, reads: Tensor, best: Tensor, log_sum: Tensor) -> Tensor:
        """Scores of the named tokens of all reads, one after another."""
        counts = [len(ids) for ids in self._named.values()]
        places = upload(np.repeat(np.array(list(self._named), dtype=np.int64), counts), logits.device)
        tokens = upload([token for ids in self._named.values() for token in ids], logits.device)
        x = logits[reads.index_select(0, places), tokens].float()
        return (x - best.index_select(0, places)) - log_sum.index_select(0, places)


def score(logits: Tensor, reads: Tensor, tokens: Tensor, most: int, *, normalise: bool) -> TokenScores:
    """The op `token_logprobs` of the logits' device."""
    scores: TokenScores = kernel("token_logprobs", logits.device.type)(logits, reads, tokens, most, normalise=normalise)
    return scores


def entries_of(scores: Scores, wanted: list[int]) -> list[TokenLogprobs]:
    """Entries of n tokens; `wanted` [n] is how many of the likeliest to report for each."""
    own, ranks, ids, values = (column.tolist() for column in scores)
    return [TokenLogprobs(own[i], ranks[i], ids[i][:count], values[i][:count]) for i, count in enumerate(wanted)]


def scores_of(logits: Tensor, tokens: Tensor, most: int) -> Scores:
    """Log probabilities of a token for each row of logits [n, vocab], with `most` others beside it."""
    every = torch.arange(len(tokens), device=tokens.device)
    found = score(logits, every, tokens, min(most, logits.shape[-1]), normalise=True)
    return Scores(*found[:4])
