"""Matrix products with weights from the checkpoint, several stacked into one where they share their input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.kernels.reference.quantized_rows import Rows
from quire.lora.updates import LowRankUpdate, PendingUpdate
from quire.quantization.scheme import LinearPart, LinearShape, LinearWeight, RowForm, UpdatedWeight, WeightScheme
from quire.weights.checkpoint import Checkpoint, WeightSpec
from quire.weights.shards import Shards
from quire.weights.tensor_options import TensorOptions


class Projection(Protocol):
    """What an MLP and attention need of the product that takes them out of the stream.

    Attributes:
        row_form: See LinearWeight.
    """

    row_form: RowForm | None

    def __call__(self, x: Rows) -> Tensor:
        """[tokens, columns] → [tokens, outputs]."""
        ...

    def pending(self, x: Rows) -> Tensor | PendingUpdate:
        """The same, where what adapters add is left to whoever reads the outputs."""
        ...

    def silu_and_mul(self, x: Rows) -> Tensor:
        """[tokens, columns] → [tokens, half of the rows]: silu of the first half of the outputs times the second."""
        ...


class Linear:
    """x Wᵀ + b, where W stacks the weights of the shape's modules, in whatever form its scheme keeps it.

    Args:
        shape: Of W.
        bias: Whether the modules have biases.
        scheme: Loads W and multiplies with it.
        options: The device of all, and the dtype of b.
        part: Of what W is a part; None: it is whole.

    Attributes:
        outputs, columns: Of W.
        has_bias: Whether there is b.
        library_product, row_form: See LinearWeight.
    """

    def __init__(
        self,
        shape: LinearShape,
        bias: bool,
        scheme: WeightScheme,
        options: TensorOptions,
        part: LinearPart | None = None,
    ) -> None:
        self.outputs = shape.outputs
        self.columns = shape.columns
        self.has_bias = bias and (part is None or part.adds_bias)
        self._shape = shape
        self._options = options
        self._weight = scheme.linear(shape, options) if part is None else _divided(scheme, shape, part, options)
        self.library_product = self._weight.library_product
        self.row_form = self._weight.row_form
        self._bias: Tensor | None = None
        own = (*self._weight.weight_specs(), *_bias_specs(shape, bias))
        self._shards = Shards(own)
        if part is not None:
            whole = (*scheme.linear(part.whole, options).weight_specs(), *_bias_specs(part.whole, bias))
            self._shards = Shards(whole, own, part.cuts.__getitem__)

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield from self._shards.specs

    def load_weights(self, checkpoint: Checkpoint) -> None:
        checkpoint = self._shards.of(checkpoint)
        self._weight.load(checkpoint)
        if self.has_bias:
            self._bias = torch.empty(self.outputs, dtype=self._options.dtype, device=self._options.device)
            for name, part in zip(self._shape.names, torch.split(self._bias, list(self._shape.rows)), strict=True):
                checkpoint.read(f"{name}.bias", part)

    def __call__(self, x: Rows) -> Tensor:
        """[tokens, columns] → [tokens, outputs]."""
        return self._weight.multiply(x, self._bias)

    def pending(self, x: Rows) -> Tensor:
        """The same: it has no adapters."""
        return self(x)

    def silu_and_mul(self, x: Rows) -> Tensor:
        """[tokens, columns] → [tokens, half of the rows]: silu of the first half of the outputs times the second."""
        return self._weight.multiply_silu_and_mul(x, self._bias)

    def multiply_and_shrink(self, x: Tensor, update: LowRankUpdate) -> tuple[Tensor, Tensor]:
        """The outputs, and A x of the update; in one launch where the weight has one."""
        weight = self._weight
        if isinstance(weight, UpdatedWeight):
            return weight.multiply_and_shrink(x, self._bias, update.weights, update.tiles)
        low = update.shrink(x)
        return weight.multiply(x, self._bias), low


def _divided(scheme: WeightScheme, shape: LinearShape, part: LinearPart, options: TensorOptions) -> LinearWeight:
    """A rank's weight.

    Raises:
        CheckpointError: The form of the weight does not serve its shape.
    """
    scheme.linear(part.whole, options)  # raises what has nothing to do with ranks
    try:
        return scheme.linear(shape, options)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error.message} Or lower --tensor-parallel-size: this is a rank's part.", param="tensor_parallel_size"
        ) from None


def _bias_specs(shape: LinearShape, bias: bool) -> Iterator[WeightSpec]:
    if bias:
        for name, rows in zip(shape.names, shape.rows, strict=True):
            yield WeightSpec(f"{name}.bias", (rows,))
