"""Log probabilities of tokens and of others beside them: the likeliest ones, or those that were named.

Knows nothing about how a token was drawn, nor whether its logits are the model's own or what sampling made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.messages import TokenLogprobs

Ints = npt.NDArray[np.int64]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
NO_LOGPROBS = -1


class Reports:
    """Of the reads of a step that want them.

    Args:
        wanted: [reads] number of likeliest tokens to report for each read, or NO_LOGPROBS.
        named: Tokens to report in place of these, by read.
        mode: `processed` is what tokens were drawn from, `raw` what the model said; `logits` are reported as they are.
    """

    def __init__(self, wanted: Ints, named: Mapping[int, list[int]], mode: LogprobsMode) -> None:
        self._wanted = wanted
        self._named = named
        self._mode = mode
        self._reads = np.flatnonzero(wanted != NO_LOGPROBS)
        self._rows: Tensor
        self._values: Tensor  # [asking reads, vocab]

    def __bool__(self) -> bool:
        return bool(len(self._reads))

    @property
    def processed(self) -> bool:
        """Whether what tokens were drawn from is to be seen, and not what the model said."""
        return self._mode.startswith("processed")

    def see(self, logits: Tensor) -> None:
        """Take what is reported from logits [reads, vocab], which may change afterwards."""
        self._rows = torch.from_numpy(self._reads).to(logits.device)
        values = logits.index_select(0, self._rows).float()
        self._values = values if self._mode.endswith("logits") else values.log_softmax(-1)

    def of(self, tokens: Tensor) -> list[TokenLogprobs | None]:
        """One entry a read, None where it was not asked for. `tokens` [reads] int64 are the drawn ones."""
        wanted = self._wanted[self._reads]
        entries: list[TokenLogprobs | None] = [None] * len(self._wanted)
        drawn = tokens.index_select(0, self._rows)
        for i, entry in enumerate(entries_of(self._values, drawn, wanted.tolist())):
            read = int(self._reads[i])
            if read in self._named:
                ids = self._named[read]
                values = self._values[i, torch.tensor(ids, device=self._values.device)].tolist()
                entry = TokenLogprobs(entry.logprob, entry.rank, ids, values)
            entries[read] = entry
        return entries


def entries_of(values: Tensor, tokens: Tensor, wanted: list[int]) -> list[TokenLogprobs]:
    """Entries of n tokens.

    Args:
        values: [n, vocab] fp32, of every token.
        tokens: [n] int64.
        wanted: [n] how many of the best to report for each.
    """
    own = values.gather(1, tokens.unsqueeze(1))  # [n, 1]
    ranks = (values > own).sum(-1).add_(1).tolist()
    top = values.topk(min(max(wanted), values.shape[-1]))
    best, ids = top.values.tolist(), top.indices.tolist()
    return [
        TokenLogprobs(logprob, ranks[i], ids[i][: wanted[i]], best[i][: wanted[i]])
        for i, logprob in enumerate(own.squeeze(1).tolist())
    ]
