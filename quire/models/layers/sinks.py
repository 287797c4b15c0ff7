"""Learned scores that softmaxes of attention start with, one for each query head (attention sinks)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.compute.mesh import Span
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions


class Sinks:
    """The sinks of a layer's query heads.

    Args:
        name: The name of the checkpoint's tensor.
        heads: The number of heads of the undivided layer.
        part: This rank's heads.
        options: The device.

    Attributes:
        values: [this rank's heads] fp32, written by `load_weights`.
    """

    def __init__(self, name: str, heads: int, part: Span, options: TensorOptions) -> None:
        self._spec = WeightSpec(name, (heads,))
        self._start = part.start
        self.values = torch.zeros(part.count, device=options.device)

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield self._spec

    def load_weights(self, checkpoint: Checkpoint) -> None:
        checkpoint.read(self._spec.name, self.values, (self._start,))
