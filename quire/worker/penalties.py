"""Presence, frequency and repetition penalties, for the slots that ask for one.

The counts live on the device, which counts what it draws by itself: no step waits for the host to learn a token. Rows
of counts are for asking slots only; for all they would be the largest thing beside the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.reference.penalties import IN_PROMPT, ONE_MORE
from quire.kernels.table import kernel
from quire.messages import Admitted
from quire.worker.upload import upload


class Penalties:
    """What each asking slot's sequence has so far, and how much that costs.

    Args:
        vocab_size: Width of a row of counts.
        device: Where they live.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._penalize, self._count = kernel("penalize", device.type), kernel("count_drawn", device.type)
        self._rows: dict[int, int] = {}  # by slot
        self._free: list[int] = []
        self._seen = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)  # see the op `penalize`
        self._weights = torch.zeros((0, 3), device=device)  # presence, frequency, repetition

    def admit(self, owner: Admitted) -> bool:
        """A slot's new owner; whether it asks for any of this."""
        if owner.slot in self._rows:
            self._free.append(self._rows.pop(owner.slot))
        asked = owner.sampling
        if not asked.penalizes:
            return False
        row = self._rows[owner.slot] = self._take_row()
        weights = (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty)
        self._weights[row].copy_(upload(weights, self._device, torch.float32))
        history = upload(owner.history, self._device)
        prompt, output = history[: owner.prompt_len], history[owner.prompt_len :]
        seen = self._seen[row].zero_().index_fill_(0, prompt, IN_PROMPT)
        seen.index_add_(0, output, torch.full_like(output, ONE_MORE, dtype=torch.int32))
        return True

    def concerns(self, slot: int) -> bool:
        """Whether the slot asks for any."""
        return slot in self._rows

    def apply(self, logits: Tensor, asking: Sequence[tuple[int, int]]) -> None:
        """Change logits [reads, vocab] fp32 in place; `asking` are (read, slot)."""
        if own := self._own(asking):
            self._penalize(logits, *upload(own, self._device), self._seen, self._weights)

    def drew(self, tokens: Tensor, asking: Sequence[tuple[int, int]]) -> None:
        """Count what each read drew; `tokens` [reads] int64."""
        if own := self._own(asking):  # a slot stands in one row of a step, so no row comes twice
            self._count(tokens, *upload(own, self._device), self._seen)

    def rehearse(self, logits: Tensor) -> None:
        """Run both kernels on logits [reads, vocab] fp32 that are nobody's."""
        first = upload([[0], [0]], self._device)
        seen, weights = self._seen.new_zeros((1, logits.shape[-1])), self._weights.new_ones((1, 3))
        self._penalize(logits, *first, seen, weights)
        self._count(first[0], *first, seen)

    def _own(self, asking: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Reads and rows of the slots that ask for this, or nothing."""
        pairs = [(read, self._rows[slot]) for read, slot in asking if slot in self._rows]
        return [list(column) for column in zip(*pairs, strict=True)]

    def _take_row(self) -> int:
        if not self._free:
            size = len(self._seen)
            self._seen, self._weights = (
                torch.cat((each, each.new_zeros((max(1, size), each.shape[1])))) for each in (self._seen, self._weights)
            )
            self._free = list(range(size, len(self._seen)))
        return self._free.pop()
