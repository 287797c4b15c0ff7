"""Where a layer's weights live, and in what dtype."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from quire.models.weights.packed import PackedAtStart, PackedWeights


@dataclass(frozen=True)
class TensorOptions:
    """The device and dtype of a layer's weights, and where they are kept packed."""

    device: torch.device
    dtype: torch.dtype
    packed_weights: PackedWeights = field(default_factory=PackedAtStart)
