"""Presence, frequency and repetition penalties, for the slots that ask for one.

The counts live on the device, which counts what it draws by itself: no step waits for the host to learn a token. Every
slot has a row of counts from the start, 4 bytes a token of the vocabulary, so that none is missing when it is wanted:
256 slots of 128,256 tokens are 132 MB. On a CPU only what is written is taken up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.dispatch import kernel
from quire.kernels.reference.penalties import IN_PROMPT, ONE_MORE
from quire.messages import Admitted
from quire.sampling import LARGEST_EFFECT
from quire.worker.pinned_memory import upload
from quire.worker.startup.host_memory import lazy_zeros


class Penalties:
    """What each asking slot's sequence has so far, and how much that costs.

    Args:
        slots: How many there are.
        vocab_size: Width of a row of counts.
        device: Where they live.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._apply_penalties, self._count = (
            kernel("apply_penalties", device.type),
            kernel("count_sampled", device.type),
        )
        self._asking: set[int] = set()
        self._seen = lazy_zeros((slots, vocab_size), torch.int32, device)  # see the op `apply_penalties`
        self._weights = torch.zeros((slots, 3), device=device)  # presence, frequency, repetition

    def admit(self, owner: Admitted) -> bool:
        """A slot's new owner; whether it asks for any of this."""
        slot, asked = owner.slot, owner.sampling
        self._asking.discard(slot)
        if not asked.penalizes:
            return False
        self._asking.add(slot)
        repetition = max(1 / LARGEST_EFFECT, min(LARGEST_EFFECT, asked.repetition_penalty))
        weights = (asked.presence_penalty, asked.frequency_penalty, repetition)
        self._weights[slot].copy_(upload(weights, self._device, torch.float32))
        history = upload(owner.history, self._device)
        prompt, output = history[: owner.prompt_len], history[owner.prompt_len :]
        seen = self._seen[slot].zero_().index_fill_(0, prompt, IN_PROMPT)
        seen.index_add_(0, output, torch.full_like(output, ONE_MORE, dtype=torch.int32))
        return True

    def concerns(self, slot: int) -> bool:
        """Whether the slot asks for any."""
        return slot in self._asking

    def apply(self, logits: Tensor, asking: Sequence[tuple[int, int]]) -> None:
        """Change logits [reads, vocab] fp32 in place; `asking` are (read, slot)."""
        if own := self._own(asking):
            self._apply_penalties(logits, *upload(own, self._device), self._seen, self._weights)

    def drew(self, tokens: Tensor, asking: Sequence[tuple[int, int]]) -> None:
        """Count what each read drew; `tokens` [reads] int64."""
        if own := self._own(asking):  # a slot stands in one row of a step, so no row comes twice
            self._count(tokens, *upload(own, self._device), self._seen)

    def rehearse(self, logits: Tensor) -> None:
        """Run both kernels on logits [reads, vocab] fp32 that are nobody's."""
        first = upload([[0], [0]], self._device)
        seen, weights = self._seen.new_zeros((1, logits.shape[-1])), self._weights.new_ones((1, 3))
        self._apply_penalties(logits, *first, seen, weights)
        self._count(first[0], *first, seen)

    def _own(self, asking: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Reads and slots that ask for this, or nothing."""
        own = [(read, slot) for read, slot in asking if slot in self._asking]
        return [list(column) for column in zip(*own, strict=True)]
