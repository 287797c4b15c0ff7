"""From logits to tokens: the likeliest one, or one draw from what the filters leave.

The order is vLLM's: temperature, min_p, top_k, top_p, then one random number. The filters set what they cut to -inf,
and among equal scores keep the lower token ids, so exactly k tokens stay. Nothing here knows what changed the logits
before."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.compute.kernels.reference.philox import uniform
from quire.sampling_params import MIN_TEMPERATURE

FINE, UNSOUND, NOTHING_LEFT = range(3)
"""Faults of a row of logits: none, a NaN or +inf, or every token at -inf."""
ALL_TIES = 2**62
"""The `last_id` for which every token that ties with the threshold stays."""


class SamplingColumns(NamedTuple):
    """The sampling parameters of each slot, all [slots].

    Attributes:
        temperature: fp32; 0 is greedy.
        top_k: int64; off at 0 or less, or from the vocabulary's size on.
        top_p, min_p: fp32; off at 1 and at 0.
        seed: int64, the 64 bits of the key.
        drawn: int64, the counter: how many tokens the slot has drawn.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    drawn: Tensor


class SamplingThresholds(NamedTuple):
    """Where the filters cut: tokens with a logit above `value` stay, and of equal ones the ids up to `last_id`.

    Attributes:
        value: [reads] fp32.
        last_id: [reads] int64.
    """

    value: Tensor
    last_id: Tensor


def sample(
    logits: Tensor,
    slots: Tensor,
    asked: SamplingColumns,
    tokens: Tensor,
    faults: Tensor,
    last: Tensor | None = None,
    thresholds: SamplingThresholds | None = None,
) -> None:
    """Draw a token for each read, and move its slot on.

    A greedy slot gets the likeliest token, of equal ones the lowest id. Others get the first token, in token order, at
    which the cumulative probability exceeds the number that Philox gives for (seed, drawn).

    Args:
        logits: [reads, vocab] floating; not changed.
        slots: [reads] int64; only a slot without an owner may be given twice.
        asked: The parameters of all slots.
        tokens: [reads] int64, out. Always an id, but without meaning where there is a fault.
        faults: [reads] int8, out: FINE, UNSOUND or NOTHING_LEFT.
        last: [slots] int64, out: each slot's token, which `asked.drawn` then counts; None: slots do not move on.
        thresholds: Out, if given.
    """
    best, likeliest = logits.max(dim=-1)
    tokens.copy_(likeliest)
    faults.copy_(torch.where(best == float("-inf"), NOTHING_LEFT, (~best.isfinite()).to(torch.int8)))
    if thresholds is not None:
        thresholds.value.fill_(float("-inf"))
        thresholds.last_id.fill_(ALL_TIES)
    rows = (asked.temperature.index_select(0, slots) > 0).nonzero().squeeze(1)
    if len(rows):
        own = logits if len(rows) == len(logits) else logits.index_select(0, rows)
        columns = SamplingColumns(*(column.index_select(0, slots.index_select(0, rows)) for column in asked))
        scores = _apply_filters(own, columns)
        tokens.index_copy_(0, rows, sample_from_scores(scores, uniform(columns.seed, columns.drawn)))
        if thresholds is not None:
            value, end = _thresholds_of(own, scores)
            thresholds.value.index_copy_(0, rows, value)
            thresholds.last_id.index_copy_(0, rows, end)
    if last is not None:
        last.index_copy_(0, slots, tokens)
        asked.drawn.index_add_(0, slots, torch.ones_like(slots))


def sample_from_scores(scores: Tensor, number: Tensor) -> Tensor:
    """Return the first token at which the cumulative probability, in token order, exceeds `number`.

    Args:
        scores: [n, vocab] fp32, whose softmax is the probabilities. A token at -inf is never chosen.
        number: [n] float64 in [0, 1).
    """
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    cumulative = weights.to(torch.float64).cumsum(-1)
    target = number.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=scores.shape[-1] - 1)


def apply_thresholds(logits: Tensor, temperature: Tensor, thresholds: SamplingThresholds) -> Tensor:
    """Return what tokens are drawn from: logits [n, vocab] by the temperature, fp32, and -inf where the filters cut.

    Args:
        logits: [n, vocab].
        temperature: [n] fp32; 0, which is greedy, divides nothing.
        thresholds: The thresholds of these rows.
    """
    x = logits.float()
    ids = torch.arange(x.shape[-1], device=x.device)
    value, last = thresholds.value.unsqueeze(1), thresholds.last_id.unsqueeze(1)
    stays = (x > value) | ((x == value) & (ids <= last))
    divisor = torch.where(temperature > 0, temperature.clamp(min=MIN_TEMPERATURE), 1.0)
    return (x / divisor.unsqueeze(1)).masked_fill_(~stays, float("-inf"))


def _apply_filters(logits: Tensor, asked: SamplingColumns) -> Tensor:
    """Return scores [n, vocab] fp32: logits by the temperature, and -inf where the filters cut."""
    vocab = logits.shape[-1]
    scores = logits.float() / asked.temperature.clamp(min=MIN_TEMPERATURE).unsqueeze(1)
    if bool((asked.min_p > 0).any()):
        scores = apply_min_p(scores, asked.min_p)
    cuts = (asked.top_p < 1) | ((asked.top_k > 0) & (asked.top_k < vocab))
    rows = cuts.nonzero().squeeze(1)
    if len(rows):
        some = apply_top_k_top_p(scores.index_select(0, rows), asked.top_k[rows], asked.top_p[rows])
        scores.index_copy_(0, rows, some)
    return scores


def _thresholds_of(logits: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest logit [n] that stays, and the highest id [n] of the tokens that have it."""
    stays = scores > float("-inf")
    value = logits.float().masked_fill(~stays, float("inf")).amin(-1)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    at_edge = stays & (logits == value.unsqueeze(1))
    return value, ids.expand_as(logits).masked_fill(~at_edge, -1).amax(-1)


_MINUS_INFINITY = float("-inf")
_FIRST_LOOK = 1024
"""The likeliest tokens that are sorted first; the whole vocabulary is sorted only where top_p reaches beyond them."""
_MAX_LOGITS = 2**24
"""The most logits that are changed at a time, but at least one row; each takes some 5 bytes meanwhile."""


def apply_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    """Cut tokens less than `min_p` times as likely as the likeliest: scores [n, vocab] fp32, min_p [n]."""
    floor = scores.amax(-1, keepdim=True) + min_p.log().unsqueeze(1)
    return scores.masked_fill(scores < floor, _MINUS_INFINITY)


def apply_top_k_top_p(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the `top_k` likeliest, and of these the fewest whose probabilities reach `top_p`, but at least one.

    scores is [n, vocab] fp32, top_k [n] int64, off at 0 or less, and top_p [n] fp32, off at 1.
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
    """Return how many of the best scores `ranked` [n, width], falling, stay, and the last of them; both [n].

    `total` [n] fp64 is the sum of exp(score - best) over the whole vocabulary.
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
    """Cut all but the `kept` best of each row, down to the score `worst`; of equal ones the lower ids stay."""
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
        rows: [n] int64, the reads that have a bitmask, each once.
        bits: [n, words] int32, the bitmasks: token t is allowed where bit t % 32 of word t // 32 is 1.
    """
    vocab, places = logits.shape[1], torch.arange(8, dtype=torch.uint8, device=bits.device)
    each = max(1, _MAX_LOGITS // vocab)
    for some, theirs in zip(torch.split(rows, each), torch.split(bits, each), strict=True):
        in_bytes = theirs.contiguous().view(torch.uint8).unsqueeze(-1)  # [n, words · 4, 1], the lowest byte first
        forbidden = in_bytes.bitwise_right_shift(places).bitwise_and_(1).logical_not().flatten(1)  # [n, words · 32]
        own = logits.index_select(0, some).masked_fill_(forbidden[:, :vocab], float("-inf"))
        logits.index_copy_(0, some, own)
