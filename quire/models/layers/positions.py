"""Where each token of a step stands in its sequence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Positions:
    """One entry a token.

    Attributes:
        own: [tokens] int64, from 0 on.
        lengths: [tokens] int64, how long its sequence counts as, for layers that compute differently in long ones;
            None for models that have no such layer.
    """

    own: Tensor
    lengths: Tensor | None = None
