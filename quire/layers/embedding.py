"""Tokens to vectors, and vectors back to logits where the two share a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.dispatch import kernel
from quire.layers.divided import VocabularyEmbedding
from quire.weights.checkpoint import Checkpoint, WeightSpec
from quire.weights.tensor_options import TensorOptions


class Embedding:
    """A row of the weight for each token, times `scale` in the weight's dtype.

    Attributes:
        weight: As the kernel `embed` takes it, once it is loaded.
    """

    def __init__(
        self, name: str, vocab_size: int, width: int, options: TensorOptions, scale: float | None = None
    ) -> None:
        self._spec = WeightSpec(f"{name}.weight", (vocab_size, width))
        self._options = options
        self._scale = None if scale is None else float(torch.tensor(scale, dtype=options.dtype))
        self._embed = kernel("embed", options.device.type)
        self._pack: Callable[[Tensor], Any] | None = None
        self.weight: Any

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield self._spec

    def load_weights(self, checkpoint: Checkpoint) -> None:
        kind = "embedding" if self._pack is None else "tied embedding"
        name = f"{kind} {self._spec.name} {self._spec.shape}"
        self.weight = self._options.packed_weights.get(name, lambda: self._read(checkpoint))

    def tie(self) -> None:
        """Keep the weight in a layout that products with it take as well. Comes before the weight is loaded."""
        self._pack = kernel("pack_tied", self._options.device.type)

    def __call__(self, tokens: Tensor) -> Tensor:
        """[tokens] int64 → [tokens, width]."""
        x = torch.empty((len(tokens), self._spec.shape[1]), dtype=self._options.dtype, device=self._options.device)
        self._embed(tokens, self.weight, self._scale, x)
        return x

    def _read(self, checkpoint: Checkpoint) -> Any:
        weight = torch.empty(self._spec.shape, dtype=self._options.dtype, device=self._options.device)
        checkpoint.read(self._spec.name, weight)
        return weight if self._pack is None else self._pack(weight)


class TiedHead:
    """Logits from the embedding's own weight, in the layout that the look-up takes."""

    def __init__(self, embedding: Embedding | VocabularyEmbedding, options: TensorOptions) -> None:
        embedding.tie()
        self._embedding = embedding
        self._linear = kernel("linear", options.device.type)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, width] → [tokens, rows of the weight]."""
        logits: Tensor = self._linear(x, self._embedding.weight, None)
        return logits
