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
    """The position of each token of a step in its sequence.

    Attributes:
        own: [tokens] int64, counted from 0.
        lengths: [tokens] int64, the length that each token's sequence counts as, for layers that compute differently in
            long sequences; None: the model has no such layers.
    """

    own: Tensor
    lengths: Tensor | None = None


@dataclass(frozen=True)
class Angles:
    """Cosines and sines of each token's position times each frequency, [tokens, width / 2].

    `width` is the number of a head's dimensions that are rotated.

    Attributes:
        cos, sin: The angles; None: the layer rotates nothing.
        query_scale: [tokens] fp32, factors of queries; None: they have none.
    """

    cos: Tensor | None
    sin: Tensor | None
    query_scale: Tensor | None = None


class Rotary:
    """Turns positions into angles.

    Args:
        frequencies: [width / 2] fp32, radians a position for each pair of dimensions; or a function that returns each
            token's own frequencies [tokens, width / 2] for the lengths [tokens] that their sequences count as.
        scale: Factor of cosine and sine.
        options: The device and dtype of the angles.
    """

    def __init__(self, frequencies: Tensor | Callable[[Tensor], Tensor], scale: float, options: TensorOptions) -> None:
        self._frequencies = frequencies.to(options.device) if isinstance(frequencies, Tensor) else frequencies
        self._scale = scale
        self._options = options
        self._angles = kernel("angles", options.device.type)

    def __call__(self, positions: Positions) -> Angles:
        """Return the angles in the model's dtype, computed in fp32."""
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
