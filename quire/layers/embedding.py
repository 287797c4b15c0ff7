"""Tokens to vectors, and vectors back to logits where the two share a weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.kernels.dispatch import kernel
from quire.layers.layer import Place
from quire.weights.checkpoint import Checkpoint, Need


class Embedding:
    """A row of the weight for each token, times `scale` in the weight's dtype."""

    def __init__(self, name: str, vocab_size: int, width: int, place: Place, scale: float | None = None) -> None:
        self._need = Need(f"{name}.weight", (vocab_size, width))
        self._place = place
        self._scale = None if scale is None else float(torch.tensor(scale, dtype=place.dtype))
        self._embed = kernel("embed", place.device.type)
        self.weight: Tensor

    def needs(self) -> Iterator[Need]:
        """See Layer."""
        yield self._need

    def pull(self, checkpoint: Checkpoint) -> None:
        """See Layer."""
        self.weight = torch.empty(self._need.shape, dtype=self._place.dtype, device=self._place.device)
        checkpoint.read(self._need.name, self.weight)

    def __call__(self, tokens: Tensor) -> Tensor:
        """[tokens] int64 → [tokens, width]."""
        x = torch.empty((len(tokens), self.weight.shape[1]), dtype=self.weight.dtype, device=self.weight.device)
        self._embed(tokens, self.weight, self._scale, x)
        return x


class TiedHead:
    """Logits from the embedding's own weight. It stays in its plain layout, which the look-up needs."""

    def __init__(self, embedding: Embedding, place: Place) -> None:
        self._embedding = embedding
        self._linear = kernel("linear", place.device.type)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, width] → [tokens, vocab_size]."""
        logits: Tensor = self._linear(x, self._embedding.weight, None)
        return logits
