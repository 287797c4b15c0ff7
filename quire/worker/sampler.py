"""Logits to tokens for a whole batch of reads at once.

The order is vLLM's: the rules of the slots that have any; then greedy, or temperature, min_p, top_k, top_p, one draw.
Knows nothing about rows, plans or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.sampling import MIN_TEMPERATURE
from quire.worker.filters import cut_min_p, cut_top
from quire.worker.philox import uniform
from quire.worker.slots import SlotTable

Ints = npt.NDArray[np.int64]

UNSOUND = "The model's output was not a number; this happens with broken weights or an overflow of the dtype."
NOTHING_LEFT = "No token is left to draw: allowed_token_ids, bad_words, logit_bias and min_tokens forbid all of them."
_FINE, _UNSOUND, _NOTHING_LEFT = range(3)


@dataclass(frozen=True)
class Drawn:
    """What a batch of reads drew.

    Attributes:
        tokens: [reads] int64; the token of a read that failed means nothing.
        faults: [reads] int8, _FINE or what is wrong.
        broken: What went wrong in logits processors, by read.
        scores: [reads, vocab] what the tokens were drawn from; None unless asked for.
    """

    tokens: Tensor
    faults: Tensor
    broken: dict[int, str]
    scores: Tensor | None

    def errors(self, faults: Tensor | None = None) -> dict[int, str]:
        """The reads that failed, and why; `faults` are those on the host, if they are there already."""
        faults = self.faults if faults is None else faults
        if not self.broken and not bool(faults.any()):
            return {}
        texts = {_UNSOUND: UNSOUND, _NOTHING_LEFT: NOTHING_LEFT}
        found = {read: texts[fault] for read, fault in enumerate(faults.tolist()) if fault}
        return dict(sorted((found | self.broken).items()))


def sample(logits: Tensor, read_slots: Ints, slots: SlotTable, *, keep_scores: bool = False) -> Drawn:
    """Draw a token for each read.

    Args:
        logits: [reads, vocab]; may be changed in place.
        read_slots: [reads] the slot of each read.
        slots: Sampling parameters, rules, seeds and counters.
        keep_scores: Return the scores as well.
    """
    best, tokens = logits.max(dim=-1)
    faults = (~best.isfinite()).to(torch.int8)  # NaN, +inf, or -inf everywhere
    broken: dict[int, str] = {}
    if asking := slots.rules.asking(read_slots):
        logits = logits.float()
        broken = slots.rules.apply(logits, asking)
        best, tokens = logits.max(dim=-1)
        faults = torch.where(faults == _FINE, _faults_of(best), faults)
    scores = logits
    at_random = np.flatnonzero(slots.host.random[read_slots])
    if len(at_random):
        rows = torch.from_numpy(at_random).to(logits.device)
        everyone = len(at_random) == len(read_slots)
        cut = _cut(logits if everyone else logits.index_select(0, rows), read_slots[at_random], slots)
        tokens.index_copy_(0, rows, _draw(cut, read_slots[at_random], slots))
        if keep_scores:
            scores = cut if everyone else logits.float().index_copy(0, rows, cut)
    if asking:
        slots.rules.drew(tokens, asking)
    return Drawn(tokens, faults, broken, scores if keep_scores else None)


def choose(scores: Tensor, number: Tensor) -> Tensor:
    """The first token at which the cumulative probability, in token order, exceeds `number`.

    Args:
        scores: [n, vocab] fp32; softmax gives the probabilities. A token at -inf is never chosen.
        number: [n] float64 in [0, 1).
    """
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    cumulative = weights.to(torch.float64).cumsum(-1)
    target = number.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=scores.shape[-1] - 1)


def _faults_of(best: Tensor) -> Tensor:
    """[reads] by the highest logit that the rules have left."""
    unsound = (~best.isfinite()).to(torch.int8)
    return torch.where(best == float("-inf"), _NOTHING_LEFT, unsound).to(torch.int8)


def _cut(logits: Tensor, read_slots: Ints, slots: SlotTable) -> Tensor:
    """[n, vocab] logits → [n, vocab] fp32 scores, divided by the temperature and without what is cut off."""
    where = torch.from_numpy(read_slots).to(logits.device)
    temperature = slots.temperature.index_select(0, where).clamp_(min=MIN_TEMPERATURE)
    scores = logits.float() / temperature.unsqueeze(1)
    if slots.host.cut_min_p[read_slots].any():
        scores = cut_min_p(scores, slots.min_p.index_select(0, where))
    cut = np.flatnonzero(slots.host.cut_top[read_slots])
    if len(cut):
        rows = torch.from_numpy(cut).to(scores.device)
        their = where.index_select(0, rows)
        some = cut_top(scores.index_select(0, rows), slots.top_k[their], slots.top_p[their])
        scores.index_copy_(0, rows, some)
    return scores


def _draw(scores: Tensor, read_slots: Ints, slots: SlotTable) -> Tensor:
    """[n, vocab] scores → [n] tokens."""
    where = torch.from_numpy(read_slots).to(scores.device)
    return choose(scores, uniform(slots.seed.index_select(0, where), slots.drawn.index_select(0, where)))
