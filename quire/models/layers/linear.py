"""Matrix products with weights from the checkpoint; modules that share an input are stacked into one product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.errors import CheckpointError
from quire.models.lora.updates import LowRankUpdate, PendingUpdate
from quire.models.quantization.scheme import LinearPart, LinearShape, LinearWeight, RowForm, UpdatedWeight, WeightScheme
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.shards import Shards
from quire.models.weights.tensor_options import TensorOptions


class Projection(Protocol):
    """What an MLP and attention need of the product that reads the stream.

    Attributes:
        row_form: The form of quantized rows that the product takes in addition to dense ones; None: dense rows only.
    """

    row_form: RowForm | None

    def __call__(self, x: Rows) -> Tensor:
        """x Wᵀ + b, and what adapters add: [tokens, columns] → [tokens, outputs]."""
        ...

    def pending(self, x: Rows) -> Tensor | PendingUpdate:
        """Compute x Wᵀ + b [tokens, outputs]; the reader of the result may have to add the adapters' update."""
        ...

    def silu_and_mul(self, x: Rows) -> Tensor:
        """silu of the first half of the outputs times the second: [tokens, columns] → [tokens, outputs / 2]."""
        ...


class ScaledProjection:
    """A Projection whose outputs have factors.

    Args:
        base: Computes the outputs.
        factors: Numbers of neighbouring outputs, and their factor.
        options: The device and dtype of factors.
    """

    def __init__(self, base: Projection, factors: Sequence[tuple[int, float]], options: TensorOptions) -> None:
        self.row_form = base.row_form
        self._base = base
        parts = [torch.full((number,), factor) for number, factor in factors]
        self._factors = torch.cat(parts).to(options.device, options.dtype)
        self._silu_and_mul = kernel("silu_and_mul", options.device.type)

    def __call__(self, x: Rows) -> Tensor:
        return self._base(x).mul_(self._factors)

    def pending(self, x: Rows) -> Tensor | PendingUpdate:
        return self(x)

    def silu_and_mul(self, x: Rows) -> Tensor:
        y = self(x)
        out = y.new_empty((y.shape[0], y.shape[1] // 2))
        self._silu_and_mul(y, out)
        return out


class Linear:
    """x Wᵀ + b, where W stacks the weights of the shape's modules, in whatever form its scheme keeps it.

    Args:
        shape: The shape of W.
        bias: Whether the modules have biases.
        scheme: Loads W and multiplies with it.
        options: The device of W and b, and the dtype of b.
        part: Which part of a whole weight W is; None: W is whole.

    Attributes:
        outputs, columns: The shape of W.
        has_bias: Whether this rank adds b.
        library_product, row_form: Attributes of the weight, a LinearWeight.
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
        return self._weight.multiply(x, self._bias)

    def pending(self, x: Rows) -> Tensor:
        """Compute x Wᵀ + b: [tokens, columns] → [tokens, outputs]; without adapters, nothing is left to add."""
        return self(x)

    def silu_and_mul(self, x: Rows) -> Tensor:
        return self._weight.multiply_silu_and_mul(x, self._bias)

    def multiply_and_shrink(self, x: Tensor, update: LowRankUpdate) -> tuple[Tensor, Tensor]:
        """Return x Wᵀ + b and A x of the update, computed in one launch if the weight's scheme has such a kernel."""
        weight = self._weight
        if isinstance(weight, UpdatedWeight):
            return weight.multiply_and_shrink(x, self._bias, update.weights, update.tiles)
        low = update.shrink(x)
        return weight.multiply(x, self._bias), low


def _divided(scheme: WeightScheme, shape: LinearShape, part: LinearPart, options: TensorOptions) -> LinearWeight:
    """Make this rank's part of a divided weight.

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
