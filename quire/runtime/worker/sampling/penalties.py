"""Presence, frequency and repetition penalties, for the slots that ask for one.

The device counts the tokens that it samples, so no step waits for the host to learn a token. Every slot has a row of
counts from the start, 4 bytes a token of the vocabulary, so that no request finds memory missing: 256 slots of 128,256
tokens are 132 MB. On a CPU only rows that are written take memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.penalties import IN_PROMPT, ONE_MORE
from quire.foundation.messages.workers import Admitted
from quire.runtime.worker.host_memory import lazy_zeros, upload
from quire.runtime.worker.sampling.token_rules import ActiveRows
from quire.sampling_params import LARGEST_EFFECT


class Penalties:
    """Which tokens each slot's sequence has, and its penalties for them.

    Args:
        slots: Number of slots.
        vocab_size: Width of a row of counts.
        device: Where the counts live.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._apply_penalties = kernel("apply_penalties", device.type)
        self._count_sampled = kernel("count_sampled", device.type)
        self._active: set[int] = set()
        self._seen = lazy_zeros((slots, vocab_size), torch.int32, device)  # see the op `apply_penalties`
        self._weights = torch.zeros((slots, 3), device=device)  # presence, frequency, repetition

    def admit(self, owner: Admitted) -> bool:
        """A slot's new owner; whether it asks for any of this."""
        slot, asked = owner.slot, owner.sampling
        self._active.discard(slot)
        if not asked.penalizes:
            return False
        self._active.add(slot)
        repetition = max(1 / LARGEST_EFFECT, min(LARGEST_EFFECT, asked.repetition_penalty))
        weights = (asked.presence_penalty, asked.frequency_penalty, repetition)
        self._weights[slot].copy_(upload(weights, self._device, torch.float32))
        history = upload(owner.history, self._device)
        prompt, output = history[: owner.prompt_len], history[owner.prompt_len :]
        seen = self._seen[slot].zero_().index_fill_(0, prompt, IN_PROMPT)
        seen.index_add_(0, output, torch.full_like(output, ONE_MORE, dtype=torch.int32))
        return True

    def apply(self, logits: Tensor, active: ActiveRows) -> None:
        """Change logits [sampled, vocab] fp32 in place."""
        if own := self._own(active):
            self._apply_penalties(logits, *upload(own, self._device), self._seen, self._weights)

    def record_tokens(self, tokens: Tensor, active: ActiveRows) -> None:
        """Count the sampled `tokens`, [sampled] int64."""
        if own := self._own(active):  # a slot has one row of a step at most, so no row of counts comes twice
            self._count_sampled(tokens, *upload(own, self._device), self._seen)

    def warm_up(self, logits: Tensor) -> None:
        """Run both kernels on unused logits [sampled, vocab] fp32."""
        first = upload([[0], [0]], self._device)
        seen, weights = self._seen.new_zeros((1, logits.shape[-1])), self._weights.new_ones((1, 3))
        self._apply_penalties(logits, *first, seen, weights)
        self._count_sampled(first[0], *first, seen)

    def _own(self, active: ActiveRows) -> list[list[int]]:
        """The rows and slots that ask for penalties, as two lists; empty if none does."""
        own = [(row, slot) for row, slot in active if slot in self._active]
        return [list(column) for column in zip(*own, strict=True)]
