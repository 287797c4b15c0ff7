"""Matrix products with weights from the checkpoint, several stacked into one where they share their input."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.quantization.scheme import LinearShape, WeightScheme
from quire.weights.checkpoint import Checkpoint, WeightSpec
from quire.weights.tensor_options import TensorOptions


class Linear:
    """x Wᵀ + b, where W stacks the weights of the shape's modules, in whatever form its scheme keeps it.

    Args:
        shape: Of W.
        bias: Whether the modules have biases.
        scheme: Loads W and multiplies with it.
        options: The device of all, and the dtype of b.

    Attributes:
        outputs, columns: Of W.
        has_bias: Whether there is b.
        library_product: See LinearWeight.
    """

    def __init__(self, shape: LinearShape, bias: bool, scheme: WeightScheme, options: TensorOptions) -> None:
        self.outputs = shape.outputs
        self.columns = shape.columns
        self.has_bias = bias
        self._shape = shape
        self._options = options
        self._weight = scheme.linear(shape, options)
        self.library_product = self._weight.library_product
        self._bias: Tensor | None = None

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield from self._weight.weight_specs()
        if self.has_bias:
            for name, rows in zip(self._shape.names, self._shape.rows, strict=True):
                yield WeightSpec(f"{name}.bias", (rows,))

    def load_weights(self, checkpoint: Checkpoint) -> None:
        self._weight.load(checkpoint)
        if self.has_bias:
            self._bias = torch.empty(self.outputs, dtype=self._options.dtype, device=self._options.device)
            for name, part in zip(self._shape.names, torch.split(self._bias, list(self._shape.rows)), strict=True):
                checkpoint.read(f"{name}.bias", part)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, columns] → [tokens, outputs]."""
        return self._weight.multiply(x, self._bias)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """[tokens, columns] → [tokens, half of the rows]: silu of the first half of the outputs times the second."""
        return self._weight.multiply_silu_and_mul(x, self._bias)
