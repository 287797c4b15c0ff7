"""Positions of tokens, and the angles of rotary position embedding, computed once a step for all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
            long sequences; None: the model has no such layers. In a model with M-RoPE that sees images, the position
            that each token counts as: an image takes fewer than it has tokens.
        axes: [3, tokens] int64, the time, row and column of each token, where some stand for images; None: all three
            are the position that a token counts as.
        types: [tokens] int64, the type of each token: 0 or, in a pair's second text, 1; None: all are 0.
    """

    own: Tensor
    lengths: Tensor | None = None
    types: Tensor | None = None
    axes: Tensor | None = None


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


class AxialRotary(Rotary):
    """Turns positions into angles, of which each frequency goes by one of a token's three positions (M-RoPE).

    Args:
        frequencies, scale, options: See Rotary.
        axes: By what each frequency goes: 0 is time, 1 is row, 2 is column.
    """

    def __init__(self, frequencies: Tensor, scale: float, options: TensorOptions, axes: Sequence[int]) -> None:
        super().__init__(frequencies, scale, options)
        self._own_frequencies = frequencies.to(options.device)
        self._axis_of_frequency = torch.tensor(axes, device=options.device)

    def __call__(self, positions: Positions) -> Angles:
        """Return the angles in the model's dtype, computed in fp32."""
        if positions.axes is None:
            own = positions.own if positions.lengths is None else positions.lengths
            return super().__call__(Positions(own))
        angles = positions.axes.index_select(0, self._axis_of_frequency).T.float() * self._own_frequencies
        shape, options = angles.shape, self._options
        cos, sin = (torch.empty(shape, dtype=options.dtype, device=options.device) for _ in range(2))
        self._angles(torch.ones_like(positions.own), angles.contiguous(), self._scale, cos, sin)
        return Angles(cos, sin)
