"""`allowed_token_ids`: which tokens a slot may sample at all, for the slots that ask.

There is a bit for each slot and token of the vocabulary from the start, so that no request finds memory missing however
many tokens it allows: 512 slots of 128,256 tokens are 8 MB, where lists of all their ids would be 525 MB.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.foundation.messages.workers import Admitted
from quire.runtime.worker.host_memory import upload
from quire.runtime.worker.sampling.active_rows import ActiveRows

MOST_LOGITS = 2**24
"""Logits that are changed at a time, at most, but one row at least. Each takes some 7 bytes meanwhile."""


class AllowedTokens:
    """Forbids all tokens but the allowed ones, for the slots that ask for it.

    Args:
        slots: Number of slots.
        vocab_size: Of the logits.
        device: Of the logits.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._active: set[int] = set()
        self._bits = torch.zeros((slots, -(-vocab_size // 8)), dtype=torch.uint8, device=device)
        self._places = torch.arange(8, dtype=torch.uint8, device=device)  # of a byte's bits, the lowest first
        self._rows = max(1, MOST_LOGITS // vocab_size)

    def admit(self, owner: Admitted) -> bool:
        """Take a slot's new owner; returns whether it asks for any of this."""
        self._active.discard(owner.slot)
        ids = owner.sampling.allowed_token_ids
        if not ids:
            return False
        self._active.add(owner.slot)
        allowed = np.zeros(self._bits.shape[1] * 8, dtype=np.bool_)
        allowed[ids] = True
        self._bits[owner.slot].copy_(upload(np.packbits(allowed, bitorder="little"), self._device, torch.uint8))
        return True

    def is_active(self, slot: int) -> bool:
        """Whether the slot asks for this."""
        return slot in self._active

    def apply(self, logits: Tensor, active: ActiveRows) -> None:
        """Change logits [sampled, vocab] fp32 in place."""
        own = [pair for pair in active if pair[1] in self._active]
        for at in range(0, len(own), self._rows):
            self._allow(logits, own[at : at + self._rows])

    def warm_up(self, logits: Tensor) -> None:
        """Take the memory that `apply` takes at most, on logits [sampled, vocab] fp32 that are unused."""
        self._allow(logits, [(row, 0) for row in range(min(len(logits), self._rows))])

    def _allow(self, logits: Tensor, active: ActiveRows) -> None:
        rows, slots = upload(active, self._device).unbind(1)
        bits = self._bits.index_select(0, slots).unsqueeze(-1)  # [n, bytes, 1]
        forbidden = bits.bitwise_right_shift(self._places).bitwise_and_(1).logical_not().flatten(1)  # [n, bytes · 8]
        own = logits.index_select(0, rows).masked_fill_(forbidden[:, : logits.shape[1]], float("-inf"))
        logits.index_copy_(0, rows, own)
