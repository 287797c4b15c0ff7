"""Accepts drafts at a given rate, regardless of the model: outputs are wrong, but steps take as long as with drafts
that are right as often. Used by benchmarks only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.foundation.config.speculation import MAX_DRAFTS

_SEED = 1
"""A fixed seed of the random numbers makes all ranks, and all runs of the same steps, decide alike."""


class SyntheticAcceptance:
    """Decides by its own random numbers which drafts are accepted. `rates` are, by position, the probabilities from 0
    to 1 that this draft and all before it are accepted, and must not increase."""

    def __init__(self, rates: Sequence[float], vocab_size: int, device: torch.device) -> None:
        before = [1.0, *rates]
        own = [rate / behind if behind else 0.0 for behind, rate in zip(before, rates, strict=False)]
        padded = own + [0.0] * (MAX_DRAFTS + 1 - len(own))
        self._rates = torch.tensor(padded, dtype=torch.float32, device=device)  # of a draft, once all before it stay
        self._vocab_size = vocab_size
        self._random = torch.Generator(device).manual_seed(_SEED)

    def falsify(self, tokens: Tensor, next_drafts: Tensor, offsets: Tensor) -> None:
        """Replace sampled tokens by the drafts that are accepted, and by other tokens where a draft is rejected.

        Args:
            tokens: [positions] int64, sampled; changed in place.
            next_drafts: [positions] int64, the draft after each position; negative if there is none, which keeps the
                token.
            offsets: [positions] int64, index of each position in its row.
        """
        drawn = torch.rand(len(tokens), generator=self._random, device=tokens.device)
        accepted = (drawn < self._rates[offsets]) & (next_drafts >= 0)
        other = torch.where(tokens == next_drafts, (tokens + 1) % self._vocab_size, tokens)
        tokens.copy_(torch.where(accepted, next_drafts, other))
