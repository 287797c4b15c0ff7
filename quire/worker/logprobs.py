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

from quire.kernels.reference.logprobs import TokenScores
from quire.kernels.table import kernel
from quire.messages import TokenLogprobs
from quire.worker.upload import upload

Ints = npt.NDArray[np.int64]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
NO_LOGPROBS = -1


class Scores(NamedTuple):
    """Of n tokens.

    Attributes:
        own: [n] fp32.
        ranks: [n] int64.
        ids: [n, k] int64, the likeliest, best first.
        values: [n, k] fp32.
        named: [] or more, fp32: of the tokens that were named, one after another.
    """

    own: Tensor
    ranks: Tensor
    ids: Tensor
    values: Tensor
    named: Tensor

    def to_host(self) -> Scores:
        """The same on the host; there once the stream has come so far."""
        return Scores(*(column.to("cpu", non_blocking=True) for column in self))


class Reports:
    """Of the reads of a step that want them.

    Args:
        wanted: [reads] number of likeliest tokens to report for each read, or NO_LOGPROBS.
        named: Tokens to report in place of these, by read.
        mode: `processed` is what tokens were drawn from, `raw` what the model said; `logits` are reported as they are.
    """

    def __init__(self, wanted: Ints, named: Mapping[int, list[int]], mode: LogprobsMode) -> None:
        self._reads = np.flatnonzero(wanted != NO_LOGPROBS)
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

    def launch(self, logits: Tensor, tokens: Tensor) -> Scores:
        """What is reported, on the device.

        Args:
            logits: [reads, vocab], or what tokens were drawn from; may change afterwards.
            tokens: [reads] int64, the drawn ones.
        """
        reads = upload(self._reads, logits.device)
        most = min(max(self._wanted), logits.shape[-1])
        scores = score(logits, reads, tokens.index_select(0, reads), most, normalise=self._mode.endswith("logprobs"))
        named = self._of_named(logits, reads, scores) if self._named else scores.own.new_empty(0)
        return Scores(*scores[:4], named)

    def collect(self, scores: Scores) -> list[TokenLogprobs | None]:
        """One entry a read, None where it was not asked for; `scores` are on the host."""
        entries: list[TokenLogprobs | None] = [None] * self._number
        values, end = scores.named.tolist(), 0
        for place, entry in enumerate(entries_of(scores, self._wanted)):
            if place in self._named:
                ids = self._named[place]
                end += len(ids)
                entry = TokenLogprobs(entry.logprob, entry.rank, ids, values[end - len(ids) : end])
            entries[int(self._reads[place])] = entry
        return entries

    def _of_named(self, logits: Tensor, reads: Tensor, scores: TokenScores) -> Tensor:
        """Scores of the named tokens of all reads, one after another."""
        counts = [len(ids) for ids in self._named.values()]
        places = upload(np.repeat(np.array(list(self._named), dtype=np.int64), counts), logits.device)
        tokens = upload([token for ids in self._named.values() for token in ids], logits.device)
        x = logits[reads.index_select(0, places), tokens].float()
        return (x - scores.best.index_select(0, places)) - scores.log_sum.index_select(0, places)


def score(logits: Tensor, reads: Tensor, tokens: Tensor, most: int, *, normalise: bool) -> TokenScores:
    """The op `token_logprobs` of the logits' device."""
    scores: TokenScores = kernel("token_logprobs", logits.device.type)(logits, reads, tokens, most, normalise=normalise)
    return scores


def entries_of(scores: Scores, wanted: list[int]) -> list[TokenLogprobs]:
    """Entries of n tokens; `wanted` [n] is how many of the likeliest to report for each."""
    own, ranks, ids, values = (column.tolist() for column in scores[:4])
    return [TokenLogprobs(own[i], ranks[i], ids[i][:count], values[i][:count]) for i, count in enumerate(wanted)]


def scores_of(logits: Tensor, tokens: Tensor, most: int) -> Scores:
    """Log probabilities of a token for each row of logits [n, vocab], with `most` others beside it."""
    every = torch.arange(len(tokens), device=tokens.device)
    found = score(logits, every, tokens, min(most, logits.shape[-1]), normalise=True)
    return Scores(*found[:4], found.own.new_empty(0))
