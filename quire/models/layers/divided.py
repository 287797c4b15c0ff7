"""Layers whose work is divided over ranks: partial sums become sums, each rank has a part of the vocabulary, and
several engines divide experts.

Vocabulary-parallel embedding and logits, and sums behind products whose input is divided, are Megatron-LM's (Shoeybi et
al. 2019, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from quire.compute.collectives.collectives import Collectives
from quire.compute.collectives.delta import PartialSum
from quire.compute.collectives.engine_group import EngineGroup
from quire.compute.kernels.dispatch import kernel
from quire.compute.mesh import Span
from quire.models.quantization.scheme import ExpertsShape
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions


class SummedOverRanks:
    """A layer whose output is a sum over ranks, each of which computes one summand."""

    def __init__(self, layer: Callable[..., Tensor], collectives: Collectives) -> None:
        self._layer = layer
        self._collectives = collectives

    def __call__(self, *x: Tensor) -> PartialSum:
        """Return this rank's summand; reading it gives the undivided layer's output."""
        return PartialSum(self._layer(*x), self._collectives)


class ExpertsOfEngines:
    """Experts that are divided among all ranks of several engines; see engine_group.py.

    Args:
        experts: Computes this rank's experts; called like `Experts.__call__`.
        own: Which experts are this rank's.
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
        """x [tokens, hidden], each token's experts, by their numbers among all, and their weights [tokens, chosen] →
        [tokens, hidden].
        """
        if self._is_first:
            self._engines.count_rows(len(x))
        x, numbers, weights = self._engines.gather(x, numbers, weights)
        self._local_indices(numbers.view(-1), self._own.start, self._own.count, numbers.view(-1))
        return self._engines.reduce(self._experts(x, numbers, weights))


class VocabularyEmbedding:
    """An embedding whose vocabulary is divided over ranks.

    Args:
        name: The name of the checkpoint's module.
        vocab_size, width: The shape of the whole weight.
        part: The tokens of this rank.
        options: The device and dtype of the weight.
        collectives: Add up over all ranks.
        scale: What rows are multiplied by, in the dtype of the options; None: nothing.

    Attributes:
        weight: The loaded weight in the layout that the kernel `embed` takes: a row for each token of this rank, and
            one of zeros for all others.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        width: int,
        part: Span,
        options: TensorOptions,
        collectives: Collectives,
        scale: float | None = None,
    ) -> None:
        self._spec = WeightSpec(f"{name}.weight", (vocab_size, width))
        self._part = part
        self._options = options
        self._collectives = collectives
        self._scale = None if scale is None else float(torch.tensor(scale, dtype=options.dtype))
        self._embed = kernel("embed", options.device.type)
        self._local_indices = kernel("local_indices", options.device.type)
        self._linear = kernel("linear", options.device.type)
        self._pack: Callable[[Tensor], Any] | None = None
        self.weight: Any

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield self._spec

    def load_weights(self, checkpoint: Checkpoint) -> None:
        kind = "embedding" if self._pack is None else "tied embedding"
        name = f"{kind} {self._spec.name} {self._spec.shape} {self._part}"
        self.weight = self._options.packed_weights.get(name, lambda: self._read(checkpoint))

    def tie(self) -> None:
        """Prepare for `multiply`, which a tied head calls. Must be called before the weight is loaded."""
        self._pack = kernel("pack_tied", self._options.device.type)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Look up the tokens' vectors: [tokens] int64 → [tokens, width], of the options' dtype."""
        rows = torch.empty_like(tokens)
        self._local_indices(tokens, self._part.start, self._part.count, rows)
        x = torch.empty((len(tokens), self._spec.shape[1]), dtype=self._options.dtype, device=self._options.device)
        self._embed(rows, self.weight, self._scale, x)
        self._collectives.all_reduce(x)
        return x

    def multiply(self, x: Tensor) -> Tensor:
        """x Wᵀ with this rank's rows of the weight, and a column of zeros: [tokens, width] → [tokens, rows + 1]."""
        y: Tensor = self._linear(x, self.weight, None)
        return y

    def _read(self, checkpoint: Checkpoint) -> Any:
        count, width = self._part.count, self._spec.shape[1]
        weight = torch.zeros((count + 1, width), dtype=self._options.dtype, device=self._options.device)
        checkpoint.read(self._spec.name, weight[:count], (self._part.start, 0))
        return weight if self._pack is None else self._pack(weight)


class GatheredLogits:
    """The head to logits, whose outputs are divided; every rank gets all logits.

    Args:
        head: Maps [tokens, width] to [tokens, at least this rank's part of the vocabulary].
        vocab_size: The whole vocabulary's size.
        collectives: Gather the columns of all ranks.
    """

    def __init__(self, head: Callable[[Tensor], Tensor], vocab_size: int, collectives: Collectives) -> None:
        self._head = head
        self._vocab_size = vocab_size
        self._collectives = collectives

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, width] → [tokens, vocab_size]."""
        logits = x.new_empty((x.shape[0], self._vocab_size))
        self._collectives.gather_columns(self._head(x), logits)
        return logits
