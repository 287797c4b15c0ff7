"""Logits to tokens for a whole batch of reads at once.

The order is vLLM's: stop tokens that are not allowed yet are cut; then greedy, or temperature, min_p, top_k, top_p and
one draw.
Knows nothing about rows, plans or models.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.sampling import MIN_TEMPERATURE
from quire.worker.filters import cut_min_p, cut_top
from quire.worker.philox import uniform
from quire.worker.slots import HostMirror, SlotTable

Ints = npt.NDArray[np.int64]
_MINUS_INFINITY = float("-inf")


def sample(logits: Tensor, read_slots: Ints, slots: SlotTable) -> tuple[Tensor, Tensor]:
    """Draw a token for each read.

    Args:
        logits: [reads, vocab]; changed in place where stop tokens are not allowed yet.
        read_slots: [reads] the slot of each read.
        slots: Sampling parameters, seeds and counters.

    Returns:
        [reads] int64 tokens, and [reads] bool: whether the logits were sound (no NaN, no +inf, not all -inf). The
        token of an unsound read means nothing.
    """
    best, tokens = logits.max(dim=-1)
    sound = best.isfinite()
    if slots.host.forbidden and _forbid_early_stops(logits, read_slots, slots.host):
        tokens = logits.argmax(dim=-1)
    at_random = np.flatnonzero(slots.host.random[read_slots])
    if len(at_random):
        everyone = len(at_random) == len(read_slots)
        rows = torch.from_numpy(at_random).to(logits.device)
        scores = logits if everyone else logits.index_select(0, rows)
        tokens.index_copy_(0, rows, _draw(scores.float(), read_slots[at_random], slots))
    return tokens, sound


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


def _draw(scores: Tensor, read_slots: Ints, slots: SlotTable) -> Tensor:
    """[n, vocab] fp32 logits → [n] tokens."""
    where = torch.from_numpy(read_slots).to(scores.device)
    temperature = slots.temperature.index_select(0, where).clamp_(min=MIN_TEMPERATURE)
    scores = scores / temperature.unsqueeze(1)
    if slots.host.cut_min_p[read_slots].any():
        scores = cut_min_p(scores, slots.min_p.index_select(0, where))
    cut = np.flatnonzero(slots.host.cut_top[read_slots])
    if len(cut):
        rows = torch.from_numpy(cut).to(scores.device)
        their = where.index_select(0, rows)
        some = cut_top(scores.index_select(0, rows), slots.top_k[their], slots.top_p[their])
        scores.index_copy_(0, rows, some)
    return choose(scores, uniform(slots.seed.index_select(0, where), slots.drawn.index_select(0, where)))


def _forbid_early_stops(logits: Tensor, read_slots: Ints, host: HostMirror) -> bool:
    """Set the stop tokens of sequences below their min_tokens to -inf; whether there were any such reads."""
    found = False
    for read, slot in enumerate(read_slots.tolist()):
        rule = host.forbidden.get(slot)
        if rule is None:
            continue
        found = True
        logits[read, rule.token_ids.to(logits.device)] = _MINUS_INFINITY
        rule.reads -= 1
        if rule.reads == 0:
            del host.forbidden[slot]
    return found
