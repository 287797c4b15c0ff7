"""The angles of rotary position embedding, computed once a step for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.layer import Place


@dataclass(frozen=True)
class Angles:
    """Cosine and sine of each token's position times each frequency, [tokens, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


class Rotary:
    """Positions to angles; `frequencies` [head_dim / 2] fp32 say how fast each pair of dimensions turns."""

    def __init__(self, frequencies: Tensor, place: Place) -> None:
        self._frequencies = frequencies.to(place.device)
        self._dtype = place.dtype

    def __call__(self, positions: Tensor) -> Angles:
        """[tokens] int64 → angles in the model's dtype, taken in fp32."""
        angles = torch.outer(positions.to(torch.float32), self._frequencies)
        return Angles(angles.cos().to(self._dtype), angles.sin().to(self._dtype))
