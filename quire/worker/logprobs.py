"""Log probabilities of drawn tokens and of the likeliest ones, from the model's raw logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.messages import TokenLogprobs
from quire.worker.slots import NO_LOGPROBS

Ints = npt.NDArray[np.int64]


class RawLogprobs:
    """Of the reads that want them; taken before sampling changes the logits, reported after it.

    Args:
        logits: [reads, vocab], raw.
        wanted: [reads] number of likeliest tokens to report for each read, or NO_LOGPROBS.
    """

    def __init__(self, logits: Tensor, wanted: Ints) -> None:
        self._wanted = wanted
        self._reads = np.flatnonzero(wanted != NO_LOGPROBS)
        self._rows = torch.from_numpy(self._reads).to(logits.device)
        self._values = logits.index_select(0, self._rows).float().log_softmax(-1)  # [asking reads, vocab]

    def of(self, tokens: Tensor) -> list[TokenLogprobs | None]:
        """One entry a read, None where it was not asked for. `tokens` [reads] int64 are the drawn ones."""
        own = self._values.gather(1, tokens.index_select(0, self._rows).unsqueeze(1))  # [asking reads, 1]
        ranks = (self._values > own).sum(-1).add_(1).tolist()
        most = min(int(self._wanted.max()), self._values.shape[-1])
        top = self._values.topk(most)
        values, ids = top.values.tolist(), top.indices.tolist()
        entries: list[TokenLogprobs | None] = [None] * len(self._wanted)
        for i, (read, logprob) in enumerate(zip(self._reads.tolist(), own.squeeze(1).tolist(), strict=True)):
            k = int(self._wanted[read])
            entries[read] = TokenLogprobs(logprob, ranks[i], ids[i][:k], values[i][:k])
        return entries
