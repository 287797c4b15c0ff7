"""Logits to tokens, for all sampled positions of a step at once.

The order is vLLM's: logits transforms of the slots that have any; then greedy, or temperature, min_p, top_k, top_p and
sampling, which the op `sample` does in one go. Nothing here waits for the device but logits processors, which need
tokens on the host. Knows nothing about rows, plans or models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.sample import (
    NOTHING_LEFT,
    UNSOUND,
    SamplingColumns,
    SamplingThresholds,
    apply_thresholds,
)
from quire.runtime.worker.host_memory import upload
from quire.runtime.worker.sampling.logprobs import UNSORTED_MOST, LogprobsMode, rows_at_once, score
from quire.runtime.worker.sampling.token_rules import ActiveRows
from quire.runtime.worker.slot_table import SlotTable

Deferred = Callable[[], AbstractContextManager[None]]
"""What is launched within it is needed by some requests only; a start need not wait for its compilation."""

_TRANSFORMED_UNSOUND = NOTHING_LEFT + 1
"""A fault that logits transforms made; the op knows nothing of them."""
UNSOUND_TEXT = "The model's output was not a number; this happens with broken weights or an overflow of the dtype."
TRANSFORMED_UNSOUND_TEXT = (
    "The model's output was sound, but this request's own rules (logits processors, penalties, logit_bias) made NaN or "
    "+inf of it; a processor forbids a token by -inf."
)
NOTHING_LEFT_TEXT = (
    "No token is left to draw: allowed_token_ids, bad_words, logit_bias, min_tokens and the grammar of a structured "
    "output forbid all of them."
)


REFUSALS = frozenset((NOTHING_LEFT_TEXT,))
"""Errors for which what the request asks for is to blame."""


def sample_and_advance(logits: Tensor, where: Tensor, slots: SlotTable, tokens: Tensor, faults: Tensor) -> None:
    """Sample by the slots' parameters alone, without logits transforms; the slots keep the tokens and count them.

    Nothing is decided on the host, so this can be captured in a CUDA graph.

    Args:
        logits: [sampled, vocab]; not changed.
        where: [sampled] int64 on the device, the slot of each position; padding is the dummy's.
        slots: The table.
        tokens: [sampled] int64, out.
        faults: [sampled] int8, out.
    """
    kernel("sample", logits.device.type)(logits, where, columns_of(slots), tokens, faults, slots.last_token)


def columns_of(slots: SlotTable) -> SamplingColumns:
    """The columns of the table that the op `sample` takes."""
    return SamplingColumns(slots.temperature, slots.top_k, slots.top_p, slots.min_p, slots.seed, slots.num_sampled)


@dataclass(frozen=True)
class Sampled:
    """What was sampled.

    Attributes:
        tokens: [sampled] int64; the token of a position that failed means nothing.
        faults: [sampled] int8; see the op `sample`, and _TRANSFORMED_UNSOUND.
        broken: What went wrong in logits processors, by position.
        scores: [sampled, vocab] what the tokens were sampled from; None unless asked for.
        transformed: The positions whose logits were changed.
    """

    tokens: Tensor
    faults: Tensor
    broken: Mapping[int, str]
    scores: Tensor | None
    transformed: Set[int] = frozenset()

    def errors(self, faults: Tensor | npt.NDArray[np.int8] | None = None) -> dict[int, str]:
        """The positions that failed, and why; `faults` are those on the host, if they are there already."""
        return errors_of(self.faults if faults is None else faults, self.broken, self.transformed)


def errors_of(
    faults: Tensor | npt.NDArray[np.int8], broken: Mapping[int, str] | None = None, transformed: Set[int] = frozenset()
) -> dict[int, str]:
    """The positions that failed, and why; see Sampled."""
    if not broken and not bool(faults.any()):
        return {}
    found = {place: _text(fault, place in transformed) for place, fault in enumerate(faults.tolist()) if fault}
    return dict(sorted((found | dict(broken or {})).items()))


def _text(fault: int, transformed: bool) -> str:
    if fault == _TRANSFORMED_UNSOUND:
        return TRANSFORMED_UNSOUND_TEXT
    return NOTHING_LEFT_TEXT if fault == NOTHING_LEFT and transformed else UNSOUND_TEXT


def sample(
    logits: Tensor,
    sampled_slots: IntArray,
    slots: SlotTable,
    *,
    keep_scores: bool = False,
    device_slots: Tensor | None = None,
) -> Sampled:
    """Sample a token for each position, with logits transforms. The table stays as it is.

    Args:
        logits: [sampled, vocab]; not changed.
        sampled_slots: [sampled] the slot of each position.
        slots: Sampling parameters, transforms, seeds and counters.
        keep_scores: Return the scores as well.
        device_slots: The same as `sampled_slots` on the device, if it is there already.
    """
    where = upload(sampled_slots, logits.device) if device_slots is None else device_slots
    active = slots.transforms.active_rows(sampled_slots)
    if active and len(active) == len(sampled_slots):
        return _sample_transformed(logits, where, slots, active, keep_scores=keep_scores)
    sampled = _sample_plain(logits, where, slots, keep_scores=keep_scores)
    if not active:
        return sampled
    rows = upload([row for row, _ in active], logits.device)
    among_active = [(place, slot) for place, (_, slot) in enumerate(active)]
    transformed = _sample_transformed(
        logits.index_select(0, rows), where.index_select(0, rows), slots, among_active, keep_scores=keep_scores
    )
    sampled.tokens.index_copy_(0, rows, transformed.tokens)
    sampled.faults.index_copy_(0, rows, transformed.faults)
    if sampled.scores is not None and transformed.scores is not None:
        sampled.scores.index_copy_(0, rows, transformed.scores)
    row_of = [row for row, _ in active]
    broken = {row_of[place]: text for place, text in transformed.broken.items()}
    return Sampled(sampled.tokens, sampled.faults, broken, sampled.scores, set(row_of))


def _sample_transformed(
    logits: Tensor, where: Tensor, slots: SlotTable, active: ActiveRows, *, keep_scores: bool
) -> Sampled:
    """Sample logits all of whose rows have transforms."""
    sound = logits.amax(-1) < float("inf")  # also where a bitmask forbids every token
    logits = logits.clone() if logits.dtype == torch.float32 else logits.float()
    broken = slots.transforms.apply(logits, active)
    sampled = _sample_plain(logits, where, slots, keep_scores=keep_scores)
    faults = torch.where(sampled.faults == UNSOUND, _TRANSFORMED_UNSOUND, sampled.faults)
    faults = torch.where(sound, faults, UNSOUND).to(torch.int8)
    slots.transforms.record_tokens(sampled.tokens, active)
    return Sampled(sampled.tokens, faults, broken, sampled.scores, set(range(len(active))))


def _sample_plain(logits: Tensor, where: Tensor, slots: SlotTable, *, keep_scores: bool) -> Sampled:
    """Sample logits without transforms."""
    number = len(logits)
    tokens = torch.empty(number, dtype=torch.int64, device=logits.device)
    faults = torch.empty(number, dtype=torch.int8, device=logits.device)
    thresholds = (
        SamplingThresholds(logits.new_empty(number, dtype=torch.float32), torch.empty_like(tokens))
        if keep_scores
        else None
    )
    kernel("sample", logits.device.type)(logits, where, columns_of(slots), tokens, faults, thresholds=thresholds)
    scores = (
        None if thresholds is None else apply_thresholds(logits, slots.temperature.index_select(0, where), thresholds)
    )
    return Sampled(tokens, faults, {}, scores)


def warm_up(
    logits: Tensor, slots: SlotTable, mode: LogprobsMode, deferred: Deferred = nullcontext, max_logprobs: int = 1
) -> None:
    """Run all that may ever sample from such logits, with the memory it takes: no kernel is compiled and no memory is
    missed while requests are served.

    Args:
        logits: [sampled, vocab], any.
        slots: Their table, whose dummy slot is sampled for.
        mode: What will be reported.
        deferred: Within it is run what only logits transforms, and scores that are kept, need. Kernels may do nothing
            there.
        max_logprobs: How many tokens may be reported beside one.
    """
    rows = torch.arange(len(logits), device=logits.device)
    where = torch.full_like(rows, slots.dummy)
    tokens, faults = torch.empty_like(rows), torch.empty_like(rows, dtype=torch.int8)
    sample_and_advance(logits, where, slots, tokens, faults)
    _warm_up_logprobs(logits, rows, tokens, mode, max_logprobs)
    with deferred():
        chosen = logits.index_select(0, rows)
        held = []  # at the same time, as in a step in which nearly all slots have transforms
        for given in (logits, chosen.float()):
            for keep_scores in {False, mode.startswith("processed")}:
                sampled = _sample_plain(given, where, slots, keep_scores=keep_scores)
                held.append(sampled.scores)
            _warm_up_logprobs(given, rows, sampled.tokens, mode, max_logprobs)
        slots.transforms.warm_up(given)


def _warm_up_logprobs(logits: Tensor, rows: Tensor, tokens: Tensor, mode: LogprobsMode, most: int) -> None:
    for normalise in {True, mode.endswith("logprobs")}:  # prompts are always reported as log probabilities
        score(logits, rows, tokens, 1, normalise=normalise)
    if most > UNSORTED_MOST:
        each = rows_at_once(logits.shape[-1])
        score(logits, rows[:each], tokens[:each], most, normalise=True)
