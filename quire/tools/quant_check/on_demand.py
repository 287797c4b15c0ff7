"""Layers whose weights are read when they compute, for two models that are too large to be in memory at once."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from quire.models.layers.layer import Layer
from quire.models.weights.checkpoint import Checkpoint


class OnDemandWeights:
    """The weights of a model, which one layer has at a time.

    Attributes:
        checkpoint: Has the weights; None: the model is still being built. Stays open as long as the model computes.
    """

    def __init__(self) -> None:
        self.checkpoint: Checkpoint | None = None
        self._owner: Layer | None = None
        self._ready: Any = None

    def of(self, layer: Layer) -> Any:
        """A copy of the layer, with weights."""
        assert self.checkpoint is not None, "computes before it can read"
        if self._owner is not layer:
            self._owner = self._ready = None  # its memory first
            ready = copy.deepcopy(layer)
            ready.load_weights(self.checkpoint)
            self._owner, self._ready = layer, ready
        return self._ready


class OnDemandLayer:
    """Stands in for a layer, with all of its methods; the layer itself never has weights."""

    def __init__(self, layer: Layer, weights: OnDemandWeights) -> None:
        self._layer = layer
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer if self._weights.checkpoint is None else self._weights.of(self._layer), name)

    def __call__(self, *x: Tensor) -> Tensor:
        y: Tensor = self._weights.of(self._layer)(*x)
        return y

    def pending(self, x: Tensor) -> Tensor:
        """The layer's output, as calling the layer returns it. Models take this method when they are built, before
        there are weights."""
        return self(x)
