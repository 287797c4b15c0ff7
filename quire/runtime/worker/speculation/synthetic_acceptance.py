"""Accepts drafts at a given rate, whether the model would have sampled them or not: outputs are wrong, and steps take
as long as with drafts that are right as often. For benchmarks alone.

Knows nothing about how drafts are verified: it changes what was sampled, and verification goes by that as ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.foundation.config.speculation import MAX_DRAFTS

_SEED = 1
"""Seed of the random numbers, so that all ranks decide alike, and so do all runs of the same steps."""


class SyntheticAcceptance:
    """Decides by random numbers of its own which drafts are accepted.

    Args:
        rates: By position, how likely the draft there and all before it are accepted; not rising, each from 0 to 1.
        vocab_size: Of the model.
        device: Where tokens are sampled.
    """

    def __init__(self, rates: Sequence[float], vocab_size: int, device: torch.device) -> None:
        before = [1.0, *rates]
        own = [rate / behind if behind else 0.0 for behind, rate in zip(before, rates, strict=False)]
        padded = own + [0.0] * (MAX_DRAFTS + 1 - len(own))
        self._rates = torch.tensor(padded, dtype=torch.float32, device=device)  # of a draft, once all before it stay
        self._vocab_size = vocab_size
        self._random = torch.Generator(device).manual_seed(_SEED)

    def falsify(self, tokens: Tensor, next_drafts: Tensor, offsets: Tensor) -> None:
        """Put the draft in place of what was sampled where it is accepted, and another token where it is not.

        Args:
            tokens: [positions] int64, sampled; changed.
            next_drafts: [positions] int64, the draft behind each; below 0: there is none, and the token stays.
            offsets: [positions] int64, each one's place in its row.
        """
        drawn = torch.rand(len(tokens), generator=self._random, device=tokens.device)
        accepted = (drawn < self._rates[offsets]) & (next_drafts >= 0)
        other = torch.where(tokens == next_drafts, (tokens + 1) % self._vocab_size, tokens)
        tokens.copy_(torch.where(accepted, next_drafts, other))
