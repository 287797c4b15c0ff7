"""Tokens to vectors, and vectors back to logits where the two share a weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.kernels.dispatch import kernel
from quire.layers.layer import TensorOptions
from quire.weights.checkpoint import Checkpoint, WeightSpec


class Embedding:
    """A row of the weight for each token, times `scale` in the weight's dtype."""

    def __init__(
        self, name: str, vocab_size: int, width: int, options: TensorOptions, scale: float | None = None
    ) -> None:
        self._spec = WeightSpec(f"{name}.weight", (vocab_size, width))
        self._options = options
        self._scale = None if scale is None else float(torch.tensor(scale, dtype=options.dtype))
        self._embed = kernel("embed", options.device.type)
        self.weight: Tensor

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield self._spec

    def load_weights(self, checkpoint: Checkpoint) -> None:
        self.weight = torch.empty(self._spec.shape, dtype=self._options.dtype, device=self._options.device)
        checkpoint.read(self._spec.name, self.weight)

    def __call__(self, tokens: Tensor) -> Tensor:
        """[tokens] int64 → [tokens, width]."""
        x = torch.empty((len(tokens), self.weight.shape[1]), dtype=self.weight.dtype, device=self.weight.device)
        self._embed(tokens, self.weight, self._scale, x)
        return x


class TiedHead:
    """Logits from the embedding's own weight. It stays in its plain layout, which the look-up needs."""

    def __init__(self, embedding: Embedding, options: TensorOptions) -> None:
        self._embedding = embedding
        self._linear = kernel("linear", options.device.type)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, width] → [tokens, vocab_size]."""
        logits: Tensor = self._linear(x, self._embedding.weight, None)
        return logits
