"""Logits of single tokens, changed for the slots that ask: `logit_bias`, and stop tokens before `min_tokens`.

All active rows of a step are changed by a few operations, however many there are. Knows nothing about tokens that were
sampled before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.foundation.messages.workers import Admitted
from quire.runtime.worker.host_memory import upload
from quire.runtime.worker.sampling.active_rows import ActiveRows, flat_index
from quire.sampling_params import LARGEST_EFFECT

_MINUS_INFINITY = float("-inf")


@dataclass
class Forbidden:
    """Tokens that a slot cannot sample yet.

    Attributes:
        token_ids: [n] int64.
        steps: For how many more sampled tokens.
    """

    token_ids: Tensor
    steps: int


class LogitBias:
    """Biases and forbids tokens for the slots that ask for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._forbidden: dict[int, Forbidden] = {}
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}

    def admit(self, owner: Admitted) -> bool:
        """Take a slot's new owner; returns whether it asks for any of this."""
        slot, sampling = owner.slot, owner.sampling
        for by_slot in (self._forbidden, self._bias):
            by_slot.pop(slot, None)
        if owner.num_sampled < sampling.min_tokens and owner.stop_ids:
            self._forbidden[slot] = Forbidden(self._ids(owner.stop_ids), sampling.min_tokens - owner.num_sampled)
        if sampling.logit_bias:
            values = [max(-LARGEST_EFFECT, min(LARGEST_EFFECT, value)) for value in sampling.logit_bias.values()]
            self._bias[slot] = self._ids(list(sampling.logit_bias)), upload(values, self._device, torch.float32)
        return self.is_active(slot)

    def is_active(self, slot: int) -> bool:
        """Whether the slot's logits are changed."""
        return slot in self._forbidden or slot in self._bias

    def apply(self, logits: Tensor, active: ActiveRows) -> list[int]:
        """Change logits [sampled, vocab] fp32 in place. Returns slots whose stop tokens are allowed from now on."""
        forbidding = [(row, slot, self._forbidden[slot]) for row, slot in active if slot in self._forbidden]
        if forbidding:
            where = flat_index(logits, [(row, forbidden.token_ids) for row, _, forbidden in forbidding])
            logits.view(-1).index_fill_(0, where, _MINUS_INFINITY)
        biased = [(row, *self._bias[slot]) for row, slot in active if slot in self._bias]
        if biased:
            where = flat_index(logits, [(row, ids) for row, ids, _ in biased])
            logits.view(-1).index_add_(0, where, torch.cat([values for _, _, values in biased]))
        ended = []
        for _, slot, forbidden in forbidding:
            forbidden.steps -= 1
            if forbidden.steps == 0:
                del self._forbidden[slot]
                ended.append(slot)
        return ended

    def _ids(self, values: Sequence[int]) -> Tensor:
        return upload(values, self._device)
