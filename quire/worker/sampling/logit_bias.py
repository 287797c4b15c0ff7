"""Logits of single tokens, changed for the slots that ask: some forbidden for a while, some biased.

All asking reads of a step are changed by a handful of operations, however many there are. Knows nothing about what was
drawn before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.messages import Admitted
from quire.sampling import LARGEST_EFFECT
from quire.worker.pinned_memory import upload

_MINUS_INFINITY = float("-inf")


@dataclass
class Forbidden:
    """Tokens that a slot cannot draw yet: for that many more reads."""

    token_ids: Tensor
    reads: int


class LogitBias:
    """By slot, for those that ask: `logit_bias`, and stop tokens before `min_tokens`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._forbidden: dict[int, Forbidden] = {}
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}

    def admit(self, owner: Admitted) -> bool:
        """A slot's new owner; whether it asks for any of this."""
        slot, sampling = owner.slot, owner.sampling
        for rules in (self._forbidden, self._bias):
            rules.pop(slot, None)
        if owner.num_sampled < sampling.min_tokens and owner.stop_ids:
            self._forbidden[slot] = Forbidden(self._ids(owner.stop_ids), sampling.min_tokens - owner.num_sampled)
        if sampling.logit_bias:
            values = [max(-LARGEST_EFFECT, min(LARGEST_EFFECT, value)) for value in sampling.logit_bias.values()]
            self._bias[slot] = self._ids(list(sampling.logit_bias)), upload(values, self._device, torch.float32)
        return self.concerns(slot)

    def concerns(self, slot: int) -> bool:
        """Whether the slot's logits are changed from here on."""
        return slot in self._forbidden or slot in self._bias

    def apply(self, logits: Tensor, asking: Sequence[tuple[int, int]]) -> list[int]:
        """Change logits [reads, vocab] fp32 in place; `asking` are (read, slot). Returns slots that forbid no more."""
        forbidding = [(read, slot, self._forbidden[slot]) for read, slot in asking if slot in self._forbidden]
        if forbidding:
            where = flat_index(logits, [(read, rule.token_ids) for read, _, rule in forbidding])
            logits.view(-1).index_fill_(0, where, _MINUS_INFINITY)
        biased = [(read, *self._bias[slot]) for read, slot in asking if slot in self._bias]
        if biased:
            where = flat_index(logits, [(read, ids) for read, ids, _ in biased])
            logits.view(-1).index_add_(0, where, torch.cat([values for _, _, values in biased]))
        ended = []
        for _, slot, rule in forbidding:
            rule.reads -= 1
            if rule.reads == 0:
                del self._forbidden[slot]
                ended.append(slot)
        return ended

    def _ids(self, values: Sequence[int]) -> Tensor:
        return upload(values, self._device)


def flat_index(logits: Tensor, tokens: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Places in the flattened logits [reads · vocab] of (read, token ids [n]), one after the other."""
    counts = [len(ids) for _, ids in tokens]
    starts = np.repeat(np.array([read for read, _ in tokens], dtype=np.int64), counts) * logits.shape[-1]
    return torch.cat([ids for _, ids in tokens]).add_(upload(starts, logits.device))
