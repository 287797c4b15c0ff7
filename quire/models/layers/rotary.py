"""Positions of tokens, and the angles of rotary position embedding, computed once a step for all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.models.weights.tensor_options import TensorOptions


@dataclass(frozen=True)
class Positions:
    """Where each token of a step stands in its sequence.

    Attributes:
        own: [tokens] int64, from 0 on.
        lengths: [tokens] int64, how long each token's sequence counts as, for layers that compute differently in long
            sequences; None for models without such layers.
    """

    own: Tensor
    lengths: Tensor | None = None


@dataclass(frozen=True)
class Angles:
    """Cosine and sine of each token's position times each frequency, [tokens, width / 2]; `width` of a head's
    dimensions turn.
    """

    cos: Tensor
    sin: Tensor


class Rotary:
    """Positions to angles.

    Args:
        frequencies: [width / 2] fp32, how fast each pair of dimensions turns; or, from the lengths [tokens] that their
            sequences count as, each token's own: [tokens, width / 2].
        scale: What cosine and sine are multiplied with.
        options: The device and dtype of the angles.
    """

    def __init__(self, frequencies: Tensor | Callable[[Tensor], Tensor], scale: float, options: TensorOptions) -> None:
        self._frequencies = frequencies.to(options.device) if isinstance(frequencies, Tensor) else frequencies
        self._scale = scale
        self._options = options
        self._angles = kernel("angles", options.device.type)

    def __call__(self, positions: Positions) -> Angles:
        """Angles in the model's dtype, taken in fp32."""
        frequencies = self._frequencies
        if not isinstance(frequencies, Tensor):
            assert positions.lengths is not None, "this model's batches have lengths"
            frequencies = frequencies(positions.lengths)
        cos, sin = (
            torch.empty(
                (len(positions.own), frequencies.shape[-1]), dtype=self._options.dtype, device=self._options.device
            )
            for _ in range(2)
        )
        self._angles(positions.own, frequencies, self._scale, cos, sin)
        return Angles(cos, sin)
