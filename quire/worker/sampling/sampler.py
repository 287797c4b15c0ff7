"""Logits to tokens for a whole batch of reads at once.

The order is vLLM's: the rules of the slots that have any; then greedy, or temperature, min_p, top_k, top_p, one draw,
which the op `sample` does for all reads in one go. Nothing here waits for the device but logits processors, which need
their tokens on the host. Knows nothing about rows, plans or models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.dispatch import kernel
from quire.kernels.reference.sample import (
    NOTHING_LEFT,
    UNSOUND,
    Edges,
    SamplingColumns,
    scores_within,
)
from quire.worker.pinned_memory import upload
from quire.worker.sampling.logits_transforms import ActiveRows
from quire.worker.sampling.logprobs import FEW, LogprobsMode, rows_at_once, score
from quire.worker.slot_table import SlotTable

Ints = npt.NDArray[np.int64]
Deferred = Callable[[], AbstractContextManager[None]]

_RULED_UNSOUND = NOTHING_LEFT + 1
"""A fault that rules made; the op knows nothing of them."""
UNSOUND_TEXT = "The model's output was not a number; this happens with broken weights or an overflow of the dtype."
RULED_UNSOUND_TEXT = (
    "The model's output was sound, but this request's own rules (logits processors, penalties, logit_bias) made NaN or "
    "+inf of it; a processor forbids a token by -inf."
)
NOTHING_LEFT_TEXT = (
    "No token is left to draw: allowed_token_ids, bad_words, logit_bias and min_tokens forbid all of them."
)


@dataclass(frozen=True)
class Drawn:
    """What a batch of reads drew.

    Attributes:
        tokens: [reads] int64; the token of a read that failed means nothing.
        faults: [reads] int8; see the op `sample`, and _RULED_UNSOUND.
        broken: What went wrong in logits processors, by read.
        scores: [reads, vocab] what the tokens were drawn from; None unless asked for.
        ruled: The reads whose logits were changed by rules.
    """

    tokens: Tensor
    faults: Tensor
    broken: dict[int, str]
    scores: Tensor | None
    ruled: Set[int] = frozenset()

    def errors(self, faults: Tensor | npt.NDArray[np.int8] | None = None) -> dict[int, str]:
        """The reads that failed, and why; `faults` are those on the host, if they are there already."""
        return errors_of(self.faults if faults is None else faults, self.broken, self.ruled)


def errors_of(
    faults: Tensor | npt.NDArray[np.int8], broken: Mapping[int, str] | None = None, ruled: Set[int] = frozenset()
) -> dict[int, str]:
    """The reads that failed, and why; see Drawn."""
    if not broken and not bool(faults.any()):
        return {}
    found = {read: _text(fault, read in ruled) for read, fault in enumerate(faults.tolist()) if fault}
    return dict(sorted((found | dict(broken or {})).items()))


def _text(fault: int, ruled: bool) -> str:
    if fault == _RULED_UNSOUND:
        return RULED_UNSOUND_TEXT
    return NOTHING_LEFT_TEXT if fault == NOTHING_LEFT and ruled else UNSOUND_TEXT


def draw_and_advance(logits: Tensor, where: Tensor, slots: SlotTable, tokens: Tensor, faults: Tensor) -> None:
    """Draw a token for each read by its slot's parameters alone, without its rules; the slots keep them and count on.

    Nothing is decided on the host, so this can be recorded in a CUDA graph.

    Args:
        logits: [reads, vocab]; not changed.
        where: [reads] int64 on the device, the slot of each read; padding is the dummy's.
        slots: The table.
        tokens: [reads] int64, out.
        faults: [reads] int8, out.
    """
    kernel("sample", logits.device.type)(logits, where, columns_of(slots), tokens, faults, slots.last)


def columns_of(slots: SlotTable) -> SamplingColumns:
    """What the op `sample` takes of the table."""
    return SamplingColumns(slots.temperature, slots.top_k, slots.top_p, slots.min_p, slots.seed, slots.drawn)


def sample(
    logits: Tensor, sampled_slots: Ints, slots: SlotTable, *, keep_scores: bool = False, where: Tensor | None = None
) -> Drawn:
    """Draw a token for each read. The table stays as it is.

    Args:
        logits: [reads, vocab]; not changed.
        sampled_slots: [reads] the slot of each read.
        slots: Sampling parameters, rules, seeds and counters.
        keep_scores: Return the scores as well.
        where: The same as `sampled_slots` on the device, if it is there already.
    """
    where = upload(sampled_slots, logits.device) if where is None else where
    asking = slots.rules.asking(sampled_slots)
    if not asking:
        return Drawn(*_draw(logits, where, slots, keep_scores=keep_scores), frozenset())
    if len(asking) == len(sampled_slots):
        return _draw_ruled(logits, where, slots, asking, keep_scores=keep_scores)
    tokens, faults, _, scores = _draw(logits, where, slots, keep_scores=keep_scores)
    reads = upload([read for read, _ in asking], logits.device)
    own = [(at, slot) for at, (_, slot) in enumerate(asking)]
    ruled = _draw_ruled(
        logits.index_select(0, reads), where.index_select(0, reads), slots, own, keep_scores=keep_scores
    )
    tokens.index_copy_(0, reads, ruled.tokens)
    faults.index_copy_(0, reads, ruled.faults)
    if scores is not None and ruled.scores is not None:
        scores.index_copy_(0, reads, ruled.scores)
    read_of = [read for read, _ in asking]
    return Drawn(tokens, faults, {read_of[at]: text for at, text in ruled.broken.items()}, scores, set(read_of))


def rehearse(
    logits: Tensor, slots: SlotTable, mode: LogprobsMode, deferred: Deferred = nullcontext, max_logprobs: int = 1
) -> None:
    """Run all that draws from such logits may ever run, with the memory it takes, so that no kernel is compiled and no
    memory is missed in the middle of serving.

    Args:
        logits: [reads, vocab], any.
        slots: Their table; its dummy slot is drawn for.
        mode: What will be reported.
        deferred: Within it is run what only rules, and scores that are kept, need. Kernels may do nothing there.
        max_logprobs: How many tokens may be reported beside one.
    """
    reads = torch.arange(len(logits), device=logits.device)
    where = torch.full_like(reads, slots.dummy)
    tokens, faults = torch.empty_like(reads), torch.empty_like(reads, dtype=torch.int8)
    draw_and_advance(logits, where, slots, tokens, faults)
    _rehearse_scores(logits, reads, tokens, mode, max_logprobs)
    with deferred():
        chosen = logits.index_select(0, reads)
        held = []  # at once, as in a step in which nearly all reads have rules
        for rows in (logits, chosen.float()):
            for keep_scores in {False, mode.startswith("processed")}:
                tokens, _, _, scores = _draw(rows, where, slots, keep_scores=keep_scores)
                held.append(scores)
            _rehearse_scores(rows, reads, tokens, mode, max_logprobs)
        slots.rules.rehearse(rows)


def _rehearse_scores(logits: Tensor, reads: Tensor, tokens: Tensor, mode: LogprobsMode, most: int) -> None:
    for normalise in {True, mode.endswith("logprobs")}:  # prompts are always reported as log probabilities
        score(logits, reads, tokens, 1, normalise=normalise)
    if most > FEW:
        each = rows_at_once(logits.shape[-1])
        score(logits, reads[:each], tokens[:each], most, normalise=True)


def _draw_ruled(logits: Tensor, where: Tensor, slots: SlotTable, asking: ActiveRows, *, keep_scores: bool) -> Drawn:
    """Of reads that all ask for rules; `asking` counts them from 0."""
    sound = logits.amax(-1).isfinite()
    logits = logits.clone() if logits.dtype == torch.float32 else logits.float()
    broken = slots.rules.apply(logits, asking)
    tokens, faults, _, scores = _draw(logits, where, slots, keep_scores=keep_scores)
    faults = torch.where(sound, torch.where(faults == UNSOUND, _RULED_UNSOUND, faults), UNSOUND).to(torch.int8)
    slots.rules.drew(tokens, asking)
    return Drawn(tokens, faults, broken, scores, set(range(len(asking))))


def _draw(
    logits: Tensor, where: Tensor, slots: SlotTable, *, keep_scores: bool
) -> tuple[Tensor, Tensor, dict[int, str], Tensor | None]:
    """Tokens, faults, nothing broken, and the scores if they are kept."""
    reads = len(logits)
    tokens = torch.empty(reads, dtype=torch.int64, device=logits.device)
    faults = torch.empty(reads, dtype=torch.int8, device=logits.device)
    edges = Edges(logits.new_empty(reads, dtype=torch.float32), torch.empty_like(tokens)) if keep_scores else None
    kernel("sample", logits.device.type)(logits, where, columns_of(slots), tokens, faults, edges=edges)
    if edges is None:
        return tokens, faults, {}, None
    return tokens, faults, {}, scores_within(logits, slots.temperature.index_select(0, where), edges)
