"""Numbers of weights, by what quantization does with them."""

from __future__ import annotations

from typing import NamedTuple


class Weights(NamedTuple):
    """Numbers of weights.

    Attributes:
        linear: Number in projections, which are the weights that quantization changes.
        other: Number in biases, norms and routers.
    """

    linear: int
    other: int = 0
