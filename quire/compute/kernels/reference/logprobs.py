"""Log probabilities and ranks of tokens, and the likeliest other tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenScores(NamedTuple):
    """Scores of a token in each of n rows of logits. The score of a logit x is (x - best) - log_sum.

    Attributes:
        own: [n] fp32, the token's score.
        ranks: [n] int64, 1 plus the number of tokens with a higher logit.
        ids: [n, k] int64, the likeliest tokens in falling order; of equal ones the lower ids come first.
        values: [n, k] fp32, the scores of `ids`.
        best: [n] fp32, the highest logit; 0 where scores are the logits.
        log_sum: [n] fp32, the logarithm of the sum of all exp(x - best); 0 where scores are the logits.
    """

    own: Tensor
    ranks: Tensor
    ids: Tensor
    values: Tensor
    best: Tensor
    log_sum: Tensor


def token_logprobs(logits: Tensor, reads: Tensor, tokens: Tensor, k: int, *, normalise: bool) -> TokenScores:
    """Score the tokens of some rows.

    Args:
        logits: [reads, vocab] floating; not changed.
        reads: [n] int64, the rows.
        tokens: [n] int64, a token of each row.
        k: How many of the likeliest tokens to return; at most vocab.
        normalise: Whether scores are log probabilities, or the logits themselves.
    """
    x = logits.index_select(0, reads).float()
    best = torch.zeros_like(x[:, 0])
    log_sum = torch.zeros_like(best)
    own = x.gather(1, tokens.unsqueeze(1))  # [n, 1]
    ranks = (x > own).sum(-1) + 1
    if normalise:
        best = x.amax(-1)
        log_sum = (x - best.unsqueeze(1)).exp().sum(-1).log()
    ids, top = _highest(x, k)
    return TokenScores(score(own, best, log_sum).squeeze(1), ranks, ids, score(top, best, log_sum), best, log_sum)


def score(x: Tensor, best: Tensor, log_sum: Tensor) -> Tensor:
    return (x - best.unsqueeze(1)) - log_sum.unsqueeze(1)


def _highest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ids and logits [n, k]; of equal logits the lower ids come first."""
    bits = (x + 0.0).view(torch.int32)  # -0 is 0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # in the order of the numbers
    ids = (key.long() << 32).sub_(torch.arange(x.shape[-1], device=x.device)).topk(k).indices
    return ids, x.gather(1, ids)
