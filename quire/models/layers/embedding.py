"""Embeddings of tokens, and heads to logits that share the embedding's weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.models.quantization.scheme import EmbeddingWeight
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions


class Embedding:
    """Looks up a row of the weight for each token and multiplies it by `scale`, in the dtype of the options."""

    def __init__(self, weight: EmbeddingWeight, width: int, options: TensorOptions, scale: float | None = None) -> None:
        self._width = width
        self._options = options
        self._scale = None if scale is None else float(torch.tensor(scale, dtype=options.dtype))
        self.weight = weight

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield from self.weight.weight_specs()

    def load_weights(self, checkpoint: Checkpoint) -> None:
        self.weight.load(checkpoint)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Look up the tokens' vectors: [tokens] int64 → [tokens, width], in the options' dtype."""
        x = torch.empty((len(tokens), self._width), dtype=self._options.dtype, device=self._options.device)
        self.weight.take(tokens, self._scale, x)
        return x

    def tie(self) -> None:
        """Prepare for `multiply`, which a tied head calls. Must be called before the weight is loaded."""
        self.weight.tie()

    def multiply(self, x: Tensor) -> Tensor:
        """x Wᵀ: [tokens, width] → [tokens, rows of the weight]."""
        return self.weight.multiply(x)


class ChangedLogits:
    """The logits of `head`, multiplied by `scale`, and then bounded by `cap`: cap · tanh(logit / cap)."""

    def __init__(
        self, head: Callable[[Tensor], Tensor], scale: float | None, cap: float | None, options: TensorOptions
    ) -> None:
        self._head = head
        self._scale = scale
        self._cap = cap
        self._soft_cap = kernel("soft_cap", options.device.type)
        self._multiply = kernel("multiply", options.device.type)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute logits: [tokens, width] → [tokens, vocab_size]."""
        logits = self._head(x)
        if self._scale is not None:
            self._multiply(logits, self._scale)
        if self._cap is not None:
            self._soft_cap(logits, self._cap)
        return logits


class TiedHead:
    """Computes logits with the embedding's weight, in a form that serves the look-up too."""

    def __init__(self, embedding: Embedding) -> None:
        embedding.tie()
        self._embedding = embedding

    def __call__(self, x: Tensor) -> Tensor:
        """Compute logits: [tokens, width] → [tokens, rows of the weight]."""
        return self._embedding.multiply(x)
