"""Cutting tokens: logits of those that a bitmask forbids; and the tail of a distribution, by min_p, top_k and top_p, on
scores that the temperature has divided.

What is cut becomes -inf. Ties are broken by the lower token id, so exactly k tokens stay. No full sort is made where
the likeliest few decide.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MINUS_INFINITY = float("-inf")
_FIRST_LOOK = 1024
"""How many of the likeliest tokens are sorted first; the whole vocabulary only where top_p reaches beyond them."""
_MAX_LOGITS = 2**24
"""Logits that are changed at a time, at most, but one row at least. Each takes some 5 bytes meanwhile."""


def apply_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    """Cut tokens less than `min_p` times as likely as the likeliest. Scores [n, vocab] fp32, min_p [n]."""
    floor = scores.amax(-1, keepdim=True) + min_p.log().unsqueeze(1)
    return scores.masked_fill(scores < floor, _MINUS_INFINITY)


def apply_top_k_top_p(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the `top_k` likeliest, and of those the fewest whose probabilities reach `top_p`; the likeliest always.

    Args:
        scores: [n, vocab] fp32.
        top_k: [n] int64; 0 or less is off.
        top_p: [n] fp32; 1 is off.
    """
    vocab = scores.shape[-1]
    top_k = torch.where(top_k > 0, top_k, vocab)
    total = (scores - scores.amax(-1, keepdim=True)).exp().sum(-1).double()
    width = min(vocab, max(_FIRST_LOOK, int(top_k.masked_fill(top_k == vocab, 0).max())))
    kept, worst = _rank(scores.topk(width).values, top_k, top_p, total)
    short = (kept == width) & (top_k > width)  # the end was not among the candidates
    if width < vocab and bool(short.any()):
        ranked = scores[short].sort(dim=-1, descending=True).values
        kept[short], worst[short] = _rank(ranked, top_k[short], top_p[short], total[short])
    return _keep(scores, kept, worst)


def _rank(ranked: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the best stay, and the score of the last of them; both [n].

    Args:
        ranked: [n, width] the best scores, falling.
        top_k: [n].
        top_p: [n].
        total: [n] fp64, sum of exp(score - best) over the whole vocabulary.
    """
    width = ranked.shape[-1]
    rank = torch.arange(width, device=ranked.device)
    weights = (ranked - ranked[:, :1]).exp().masked_fill(rank >= top_k.unsqueeze(1), 0.0)
    sums = weights.cumsum(-1, dtype=torch.float64)
    total = torch.where(top_k <= width, sums[:, -1], total)
    before = torch.nn.functional.pad(sums[:, :-1], (1, 0))
    inside = (before < (top_p * total).unsqueeze(1)) | (top_p >= 1).unsqueeze(1)
    inside &= rank < top_k.unsqueeze(1)
    kept = inside.sum(-1).clamp_(min=1)
    return kept, ranked.gather(1, kept.unsqueeze(1) - 1).squeeze(1)


def _keep(scores: Tensor, kept: Tensor, worst: Tensor) -> Tensor:
    """Cut all but the `kept` best of each row, down to the score `worst`; of equal ones those with lower ids stay."""
    worst = worst.unsqueeze(1)
    stays = scores >= worst
    excess = stays.sum(-1) > kept
    if bool(excess.any()):
        above, equal = scores > worst, scores == worst
        room = kept.unsqueeze(1) - above.sum(-1, keepdim=True)
        stays = above | (equal & (equal.cumsum(-1) <= room))
    return scores.masked_fill(~stays, _MINUS_INFINITY)


def apply_token_bitmask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set the logits of forbidden tokens to -inf.

    Args:
        logits: [reads, vocab] floating, changed in place.
        rows: [n] int64, which of the reads; each once.
        bits: [n, words] int32, a bitmask for each of them: token t is allowed where bit t % 32 of word t // 32 is 1.
    """
    vocab, places = logits.shape[1], torch.arange(8, dtype=torch.uint8, device=bits.device)
    each = max(1, _MAX_LOGITS // vocab)
    for some, theirs in zip(torch.split(rows, each), torch.split(bits, each), strict=True):
        in_bytes = theirs.contiguous().view(torch.uint8).unsqueeze(-1)  # [n, words · 4, 1], the lowest byte first
        forbidden = in_bytes.bitwise_right_shift(places).bitwise_and_(1).logical_not().flatten(1)  # [n, words · 32]
        own = logits.index_select(0, some).masked_fill_(forbidden[:, :vocab], float("-inf"))
        logits.index_copy_(0, some, own)
