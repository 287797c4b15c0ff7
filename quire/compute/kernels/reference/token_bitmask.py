"""Logits of tokens that a bitmask forbids."""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_LOGITS = 2**24
"""Logits that are changed at a time, at most, but one row at least. Each takes some 5 bytes meanwhile."""


def apply_token_bitmask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set the logits of forbidden tokens to -inf.

    Args:
        logits: [reads, vocab] floating, changed in place.
        rows: [n] int64, which of the reads; each once.
        bits: [n, words] int32, a bitmask for each of them: token t is allowed where bit t % 32 of word t // 32 is 1.
    """
    vocab, places = logits.shape[1], torch.arange(8, dtype=torch.uint8, device=bits.device)
    each = max(1, _MOST_LOGITS // vocab)
    for some, theirs in zip(torch.split(rows, each), torch.split(bits, each), strict=True):
        in_bytes = theirs.contiguous().view(torch.uint8).unsqueeze(-1)  # [n, words · 4, 1], the lowest byte first
        forbidden = in_bytes.bitwise_right_shift(places).bitwise_and_(1).logical_not().flatten(1)  # [n, words · 32]
        own = logits.index_select(0, some).masked_fill_(forbidden[:, :vocab], float("-inf"))
        logits.index_copy_(0, some, own)
