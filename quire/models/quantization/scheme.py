"""The seam between layers and the form of their weights: a layer is a shape, a `WeightScheme` all the rest of it.

The scheme says which tensors a checkpoint must have, loads them into the form that its kernels take, and multiplies.
Biases, norms and embeddings are the layers' own. Knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.compute.kernels.activations import SILU, Activation
from quire.compute.kernels.reference.experts import ExpertAdapters
from quire.compute.kernels.reference.lora import LowRankWeights, Tiles
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.shards import Cut
from quire.models.weights.tensor_options import TensorOptions


@dataclass(frozen=True)
class LinearShape:
    """A weight [sum of rows, columns] that stacks those of several modules.

    Attributes:
        names: The names of the checkpoint's modules (`….q_proj`), in the order of the output.
        rows: The output features of each module.
        columns: The input features.
        transposed: Whether the checkpoint stores each weight as [columns, rows].
        gated: Whether the outputs are gates, then as many ups, and only `multiply_silu_and_mul` is called.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    transposed: bool = False
    gated: bool = False

    @property
    def outputs(self) -> int:
        """The output features of all modules together."""
        return sum(self.rows)


@dataclass(frozen=True)
class LinearPart:
    """Which part of a divided product is this rank's.

    Attributes:
        whole: Shape of the undivided weight.
        cuts: By module, which of its outputs, or of its inputs.
        adds_bias: Whether the bias is this rank's to add: of a sum over ranks, it is one's.
    """

    whole: LinearShape
    cuts: Mapping[str, Cut]
    adds_bias: bool = True


@dataclass(frozen=True)
class EmbeddingShape:
    """An embedding's module in the checkpoint: `count` rows, one for each token or position, of `width` elements."""

    name: str
    count: int
    width: int


@dataclass(frozen=True)
class ExpertNames:
    """What a checkpoint calls an expert's projections: `{layer}.experts.{number}.{gate}.weight`. An empty `gate` says
    that experts have none.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def __iter__(self) -> Iterator[str]:
        """Iterate over gate, up and down, in the order of their use."""
        return iter((*self.first, self.down))

    @property
    def first(self) -> tuple[str, ...]:
        """The projections of the input: gate and up, or up alone."""
        return (self.gate, self.up) if self.gate else (self.up,)


@dataclass(frozen=True)
class ExpertsShape:
    """The MLPs of one layer's experts, with or without gates.

    Attributes:
        name: The name of the checkpoint's module that has the experts, by number.
        names: The names of an expert's projections.
        count: How many experts there are.
        hidden, width: The width of the experts' input and output, and of one expert.
        first: The number of the first expert: a rank may have some of a layer's experts.
        others: How many more experts the layer has.
        activation: What makes one value of a gate and an up, or of an up.
        biases: Whether all products have biases.
        adds_bias: Whether the bias of downs is this rank's to add: of a sum over ranks, it is one's.
    """

    name: str
    names: ExpertNames
    count: int
    hidden: int
    width: int
    first: int = 0
    others: int = 0
    activation: Activation = SILU
    biases: bool = False
    adds_bias: bool = True

    @property
    def numbers(self) -> range:
        """The experts' numbers in the checkpoint."""
        return range(self.first, self.first + self.count)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the first expert's projections in the checkpoint; the names of all others are alike."""
        return tuple(f"{self.name}.{self.first}.{each}" for each in self.names)

    def products(self, number: int) -> tuple[LinearShape, LinearShape]:
        """The shapes of one expert's products: gate and up together, and down."""
        *first, down = (f"{self.name}.{number}.{each}" for each in self.names)
        gate_up = LinearShape(tuple(first), (self.width,) * len(first), self.hidden)
        return gate_up, LinearShape((down,), (self.hidden,), self.width)


@dataclass(frozen=True)
class RowForm:
    """Rows that are quantized where they are made, or a row that is not normed: what a product may be given in place of
    dense ones.

    Attributes:
        dtype: The dtype of the codes; None: no rows are quantized.
        dense_up_to: The most rows that must be dense; more are quantized.
        norms_one: Whether the product takes a single row as an UnnormedRow.
    """

    dtype: torch.dtype | None
    dense_up_to: int = 0
    norms_one: bool = False


class LoadedWeight(Protocol):
    """A weight that is read from a checkpoint."""

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Yield the tensors that `load` reads. Called before anything is allocated."""
        ...

    def load(self, checkpoint: Checkpoint) -> None:
        """Allocate, read and pack. Called once, in any thread."""
        ...


class LinearWeight(LoadedWeight, Protocol):
    """The weight of one matrix product.

    Attributes:
        library_product: Which of torch's products serves it beside our own kernels: `linear`, or `scaled_linear` of
            rows with scales; None: none does. A GPU's worker runs these at the start (gemm_warmup.py).
        row_form: The form of quantized rows that the product takes besides dense ones; None: it takes dense rows only.
    """

    library_product: str | None
    row_form: RowForm | None

    def multiply(self, x: Rows, bias: Tensor | None) -> Tensor:
        """x Wᵀ + bias: [tokens, columns] → [tokens, outputs], in x's dtype."""
        ...

    def multiply_silu_and_mul(self, x: Rows, bias: Tensor | None) -> Tensor:
        """silu of the first half of x Wᵀ + bias times the second half: [tokens, columns] → [tokens, outputs / 2]."""
        ...


@runtime_checkable
class UpdatedWeight(Protocol):
    """A LinearWeight whose product is computed together with A x of its rows' low-rank updates."""

    def multiply_and_shrink(
        self, x: Tensor, bias: Tensor | None, weights: LowRankWeights, tiles: Tiles
    ) -> tuple[Tensor, Tensor]:
        """Return the result of `multiply`, and A x of the update; see the op `linear_and_shrink`."""
        ...


class ExpertWeights(LoadedWeight, Protocol):
    """The weights of one layer's experts."""

    def multiply(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Σ weight · down(activation(gate(x), up(x))) over each token's experts; see the op `experts`.

        x [tokens, hidden], each token's experts and their weights [tokens, chosen] → [tokens, hidden].
        """
        ...


@runtime_checkable
class DenseValues(Protocol):
    """A LinearWeight whose values can be had, for products of another shape."""

    def read_values(self, checkpoint: Checkpoint) -> Tensor:
        """Read the weight in place of `load`: [outputs, columns], in the model's dtype."""
        ...


@runtime_checkable
class AdaptableExperts(Protocol):
    """Weights of experts to whose products a GPU may add what adapters change."""

    def multiply_adapted(self, x: Tensor, numbers: Tensor, weights: Tensor, adapters: ExpertAdapters) -> Tensor:
        """Compute `multiply` with the adapters' low-rank updates."""
        ...


@runtime_checkable
class SeparateExperts(Protocol):
    """Weights of experts whose products can be had one by one, as adapters of experts need them on a CPU."""

    def gate_up(self, number: int, x: Tensor) -> Tensor:
        """Return one expert's gate and up projections of x, side by side, with their biases: [tokens, hidden] →
        [tokens, 2 · width], or [tokens, width] without gates."""
        ...

    def down(self, number: int, x: Tensor) -> Tensor:
        """Return one expert's down projection of x, with its bias: [tokens, width] → [tokens, hidden]."""
        ...


class EmbeddingWeight(LoadedWeight, Protocol):
    """The weight of an embedding, which a head may multiply with too."""

    def tie(self) -> None:
        """Prepare for `multiply`, which a tied head calls. Must be called before `load`."""
        ...

    def take(self, tokens: Tensor, scale: float | None, out: Tensor) -> None:
        """Write the tokens' rows, times `scale` in out's dtype: tokens [n] int64 → out [n, width]."""
        ...

    def multiply(self, x: Tensor) -> Tensor:
        """x Wᵀ: [tokens, width] → [tokens, count]."""
        ...


class EmbeddingScheme(Protocol):
    """A form of embeddings."""

    def embedding(self, shape: EmbeddingShape, options: TensorOptions) -> EmbeddingWeight:
        """The weight of an embedding, not loaded yet."""
        ...


class WeightScheme(Protocol):
    """A form of weights."""

    def linear(self, shape: LinearShape, options: TensorOptions) -> LinearWeight:
        """The weight of a matrix product, not loaded yet."""
        ...

    def experts(self, shape: ExpertsShape, options: TensorOptions) -> ExpertWeights:
        """The weights of experts, not loaded yet."""
        ...
