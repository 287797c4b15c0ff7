"""Presence, frequency and repetition penalties, for the slots that ask for one.

The counts live on the device, which counts what it draws by itself: no step waits for the host to learn a token. Rows
of counts are for asking slots only; for all they would be the largest thing beside the weights. The formulas are those
of Keskar et al. 2019 ("CTRL", section 4.1) and of OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.messages import Admitted


class Penalties:
    """What each asking slot's sequence has so far, and how much that costs.

    Args:
        vocab_size: Width of a row of counts.
        device: Where they live.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, int] = {}  # by slot
        self._free: list[int] = []
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)  # of output tokens
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
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
        self._weights[row] = torch.tensor(weights, device=self._device)
        history = torch.tensor(owner.history, dtype=torch.int64, device=self._device)
        prompt, output = history[: owner.prompt_len], history[owner.prompt_len :]
        self._in_prompt[row].zero_().index_fill_(0, prompt, True)
        self._counts[row].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        return True

    def apply(self, logits: Tensor, asking: Sequence[tuple[int, int]]) -> None:
        """Change logits [reads, vocab] fp32 in place; `asking` are (read, slot)."""
        reads = [read for read, slot in asking if slot in self._rows]
        if not reads:
            return
        rows = self._index([self._rows[slot] for _, slot in asking if slot in self._rows])
        counts = self._counts.index_select(0, rows)  # [asking, vocab]
        drawn = counts > 0
        presence, frequency, repetition = (w.unsqueeze(1) for w in self._weights.index_select(0, rows).unbind(1))
        where = self._index(reads)
        x = logits.index_select(0, where)
        scaled = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where(drawn | self._in_prompt.index_select(0, rows), scaled, x)
        x = x - frequency * counts - presence * drawn
        logits.index_copy_(0, where, x)

    def drew(self, tokens: Tensor, asking: Sequence[tuple[int, int]]) -> None:
        """Count what each read drew; `tokens` [reads] int64."""
        reads = [read for read, slot in asking if slot in self._rows]
        if reads:
            rows = self._index([self._rows[slot] for _, slot in asking if slot in self._rows])
            drawn = tokens.index_select(0, self._index(reads))
            self._counts[rows, drawn] += 1  # a slot stands in one row of a step, so no pair comes twice

    def _take_row(self) -> int:
        if not self._free:
            size = len(self._counts)
            self._counts, self._in_prompt, self._weights = (
                torch.cat((each, each.new_zeros((max(1, size), each.shape[1]))))
                for each in (self._counts, self._in_prompt, self._weights)
            )
            self._free = list(range(size, len(self._counts)))
        return self._free.pop()

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
