"""Which tokens a slot may draw at all: `allowed_token_ids`, for the slots that ask.

A bit for each slot and token of the vocabulary stands ready from the start, so that no request finds memory missing
however many tokens it allows: 512 slots of 128,256 tokens are 8 MB, where lists of all their ids would be 525 MB.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.messages import Admitted
from quire.worker.pinned_memory import upload

ROOM = 2**24
"""Logits that are changed at a time, at most (but one row at least): they take some 7 bytes each meanwhile."""


class AllowedTokens:
    """By slot.

    Args:
        slots: How many there are.
        vocab_size: Of the logits.
        device: Of the logits.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._asking: set[int] = set()
        self._bits = torch.zeros((slots, -(-vocab_size // 8)), dtype=torch.uint8, device=device)
        self._places = torch.arange(8, dtype=torch.uint8, device=device)  # of bits in a byte, the lowest first
        self._rows = max(1, ROOM // vocab_size)

    def admit(self, owner: Admitted) -> bool:
        """A slot's new owner; whether it asks for this."""
        self._asking.discard(owner.slot)
        ids = owner.sampling.allowed_token_ids
        if not ids:
            return False
        self._asking.add(owner.slot)
        allowed = np.zeros(self._bits.shape[1] * 8, dtype=np.bool_)
        allowed[ids] = True
        self._bits[owner.slot].copy_(upload(np.packbits(allowed, bitorder="little"), self._device, torch.uint8))
        return True

    def concerns(self, slot: int) -> bool:
        """Whether the slot asks for this."""
        return slot in self._asking

    def apply(self, logits: Tensor, asking: Sequence[tuple[int, int]]) -> None:
        """Change logits [reads, vocab] fp32 in place; `asking` are (read, slot)."""
        own = [pair for pair in asking if pair[1] in self._asking]
        for at in range(0, len(own), self._rows):
            self._allow(logits, own[at : at + self._rows])

    def rehearse(self, logits: Tensor) -> None:
        """Take the memory that `apply` takes at most, on logits [reads, vocab] fp32 that are nobody's."""
        self._allow(logits, [(read, 0) for read in range(min(len(logits), self._rows))])

    def _allow(self, logits: Tensor, asking: Sequence[tuple[int, int]]) -> None:
        reads, slots = upload(asking, self._device).unbind(1)
        bits = self._bits.index_select(0, slots).unsqueeze(-1)  # [n, bytes, 1]
        forbidden = bits.bitwise_right_shift(self._places).bitwise_and_(1).logical_not().flatten(1)  # [n, bytes · 8]
        own = logits.index_select(0, reads).masked_fill_(forbidden[:, : logits.shape[1]], float("-inf"))
        logits.index_copy_(0, reads, own)
