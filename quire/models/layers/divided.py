"""Layers whose work is divided over ranks: sums over ranks, vocabulary-parallel layers, and experts of several engines.

The vocabulary-parallel embedding and logits, and the sums after row-parallel products, are Megatron-LM's (Shoeybi et
al.
2019, section 3).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.compute.collectives.collectives import Collectives
from quire.compute.collectives.delta import PartialSum
from quire.compute.collectives.engine_group import EngineGroup
from quire.compute.kernels.dispatch import kernel
from quire.compute.mesh import Span
from quire.models.layers.embedding import Embedding
from quire.models.quantization.dense import DenseEmbedding
from quire.models.quantization.scheme import EmbeddingShape, ExpertsShape
from quire.models.weights.tensor_options import TensorOptions


class SummedOverRanks:
    """A layer whose output is a sum over ranks; each rank computes one summand."""

    def __init__(self, layer: Callable[..., Tensor], collectives: Collectives) -> None:
        self._layer = layer
        self._collectives = collectives

    def __call__(self, *x: Tensor) -> PartialSum:
        """Return this rank's summand; reading it gives the sum over all ranks."""
        return PartialSum(self._layer(*x), self._collectives)


class ExpertsOfEngines:
    """Experts that are divided among all ranks of several engines, which exchange tokens (engine_group.py).

    Args:
        experts: Computes this rank's experts; called like `Experts.__call__`.
        own: The numbers of this rank's experts.
        shape: The sizes of all experts.
        chosen: How many experts each token has.
        options: The device and dtype.
        engines: The group of engines.
    """

    def __init__(
        self,
        experts: Callable[..., Tensor],
        own: Span,
        shape: ExpertsShape,
        chosen: int,
        options: TensorOptions,
        engines: EngineGroup,
    ) -> None:
        self._experts = experts
        self._own = own
        self._engines = engines
        self._local_indices = kernel("local_indices", options.device.type)
        rows = torch.empty((0, shape.hidden), dtype=options.dtype, device=options.device)
        choices = rows.new_empty((0, chosen))
        self._is_first = engines.add(lambda: self(rows, choices.long(), choices))

    def __call__(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Compute the experts' weighted sum: x [tokens, hidden] → [tokens, hidden].

        Args:
            numbers, weights: [tokens, chosen], each token's experts, by their numbers among all experts, and their
            weights.
        """
        if self._is_first:
            self._engines.count_rows(len(x))
        x, numbers, weights = self._engines.gather(x, numbers, weights)
        self._local_indices(numbers.view(-1), self._own.start, self._own.count, numbers.view(-1))
        return self._engines.reduce(self._experts(x, numbers, weights))


class VocabularyEmbedding(Embedding):
    """An embedding whose vocabulary is divided over ranks.

    `multiply` returns a column for each token of this rank, and one column of zeros.

    Args:
        shape: The shape of the whole weight.
        part: The tokens of this rank.
        options: The device and dtype of the weight.
        collectives: Sums over all ranks.
        scale: Factor of the rows, in the dtype of the options; None: rows are not scaled.
    """

    def __init__(
        self,
        shape: EmbeddingShape,
        part: Span,
        options: TensorOptions,
        collectives: Collectives,
        scale: float | None = None,
    ) -> None:
        super().__init__(DenseEmbedding(shape, options, part), shape.width, options, scale)
        self._part = part
        self._collectives = collectives
        self._local_indices = kernel("local_indices", options.device.type)

    def __call__(self, tokens: Tensor) -> Tensor:
        rows = torch.empty_like(tokens)
        self._local_indices(tokens, self._part.start, self._part.count, rows)
        x = super().__call__(rows)
        self._collectives.all_reduce(x)
        return x


class GatheredLogits:
    """The head to logits, whose outputs are divided over ranks; every rank gathers all logits.

    Args:
        head: Maps [tokens, width] to [tokens, at least this rank's part of the vocabulary].
        vocab_size: The whole vocabulary's size.
        collectives: Gathers the columns of all ranks.
    """

    def __init__(self, head: Callable[[Tensor], Tensor], vocab_size: int, collectives: Collectives) -> None:
        self._head = head
        self._vocab_size = vocab_size
        self._collectives = collectives

    def __call__(self, x: Tensor) -> Tensor:
        """Compute all logits: [tokens, width] → [tokens, vocab_size]."""
        logits = x.new_empty((x.shape[0], self._vocab_size))
        self._collectives.gather_columns(self._head(x), logits)
        return logits
