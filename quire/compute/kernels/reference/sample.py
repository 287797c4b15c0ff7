"""From logits to tokens: the likeliest one, or one draw from what the filters leave.

The order is vLLM's: temperature, min_p, top_k, top_p, then one random number. Knows nothing about slots beyond their
columns, nor about what changed the logits before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.compute.kernels.reference.filters import apply_min_p, apply_top_k_top_p
from quire.compute.kernels.reference.philox import uniform
from quire.sampling_params import MIN_TEMPERATURE

FINE, UNSOUND, NOTHING_LEFT = range(3)
"""What can be wrong with a row of logits: a NaN or +inf in it, or every token at -inf."""
ALL_TIES = 2**62
"""As `last_id`: every token that ties with the threshold stays."""


class SamplingColumns(NamedTuple):
    """What each slot asks of a draw; all [slots].

    Attributes:
        temperature: fp32; 0 is greedy.
        top_k: int64; 0 or less, or the vocabulary and more, is off.
        top_p, min_p: fp32; 1 and 0 are off.
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
    """Where the filters cut: tokens with a logit above `value` stay, and of those equal to it the ids up to `last_id`.

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
    """Draw a token for each read, and let its slot go on.

    A greedy slot gets the likeliest token, of equal ones the lowest id. The others get the first token, in token order,
    at which the cumulative probability exceeds the number that Philox gives for (seed, drawn).

    Args:
        logits: [reads, vocab] floating; not changed.
        slots: [reads] int64. Only a slot that belongs to nobody may stand there twice.
        asked: By slot.
        tokens: [reads] int64, out. Always an id, but it means nothing where there is a fault.
        faults: [reads] int8, out: FINE, UNSOUND or NOTHING_LEFT.
        last: [slots] int64; where given, it keeps each slot's token, and `asked.drawn` counts it.
        thresholds: Out, where given.
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
    """The first token at which the cumulative probability, in token order, exceeds `number`.

    Args:
        scores: [n, vocab] fp32; softmax gives the probabilities. A token at -inf is never chosen.
        number: [n] float64 in [0, 1).
    """
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    cumulative = weights.to(torch.float64).cumsum(-1)
    target = number.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=scores.shape[-1] - 1)


def apply_thresholds(logits: Tensor, temperature: Tensor, thresholds: SamplingThresholds) -> Tensor:
    """What tokens are drawn from: [n, vocab] fp32 logits by the temperature, -inf where the filters cut.

    Args:
        logits: [n, vocab].
        temperature: [n] fp32; 0, which is greedy, divides nothing.
        thresholds: Of these rows.
    """
    x = logits.float()
    ids = torch.arange(x.shape[-1], device=x.device)
    value, last = thresholds.value.unsqueeze(1), thresholds.last_id.unsqueeze(1)
    stays = (x > value) | ((x == value) & (ids <= last))
    divisor = torch.where(temperature > 0, temperature.clamp(min=MIN_TEMPERATURE), 1.0)
    return (x / divisor.unsqueeze(1)).masked_fill_(~stays, float("-inf"))


def _apply_filters(logits: Tensor, asked: SamplingColumns) -> Tensor:
    """[n, vocab] logits and columns [n] → [n, vocab] fp32 scores, by the temperature, -inf where the filters cut."""
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
    """[n] lowest logit that stays, and [n] the highest id of those that have it."""
    stays = scores > float("-inf")
    value = logits.float().masked_fill(~stays, float("inf")).amin(-1)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    at_edge = stays & (logits == value.unsqueeze(1))
    return value, ids.expand_as(logits).masked_fill(~at_edge, -1).amax(-1)
