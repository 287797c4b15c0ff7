"""Matrix products with weights from the checkpoint, several stacked into one where they share their input."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.kernels.dispatch import kernel
from quire.layers.layer import TensorOptions
from quire.weights.checkpoint import Checkpoint, WeightSpec


class Linear:
    """x Wᵀ + b, where W stacks the weights of `names`.

    Args:
        names: Of the checkpoint's modules (`….q_proj`), in the order of the output.
        rows: Output features of each.
        columns: Input features.
        bias: Whether they have biases.
        options: The device and dtype of the weights.
        transposed: The checkpoint has each weight as [columns, rows].

    Attributes:
        outputs: Rows in all.
        columns: See above.
        has_bias: Whether there is b.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        rows: tuple[int, ...],
        columns: int,
        bias: bool,
        options: TensorOptions,
        transposed: bool = False,
    ) -> None:
        self.outputs = sum(rows)
        self.columns = columns
        self.has_bias = bias
        self._names = names
        self._rows = rows
        self._options = options
        self._transposed = transposed
        self._pack = kernel("pack_linear", options.device.type)
        self._linear = kernel("linear", options.device.type)
        self._linear_silu_and_mul = kernel("linear_silu_and_mul", options.device.type)
        self._weight: Tensor
        self._bias: Tensor | None = None

    def weight_specs(self) -> Iterator[WeightSpec]:
        for name, rows in zip(self._names, self._rows, strict=True):
            shape = (rows, self.columns)
            yield WeightSpec(f"{name}.weight", shape[::-1] if self._transposed else shape)
            if self.has_bias:
                yield WeightSpec(f"{name}.bias", (rows,))

    def load_weights(self, checkpoint: Checkpoint) -> None:
        name = f"linear {self._names} {self._rows} × {self.columns}"
        self._weight = self._options.packed_weights.get(
            name, lambda: self._pack(self._read_fused(checkpoint, "weight", (self.outputs, self.columns)))
        )
        if self.has_bias:
            self._bias = self._read_fused(checkpoint, "bias", (self.outputs,))

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, columns] → [tokens, sum of rows]."""
        y: Tensor = self._linear(x, self._weight, self._bias)
        return y

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """[tokens, columns] → [tokens, half of the rows]: silu of the first half of the outputs times the second."""
        out = x.new_empty((x.shape[0], self.outputs // 2))
        self._linear_silu_and_mul(x, self._weight, self._bias, out)
        return out

    def _read_fused(self, checkpoint: Checkpoint, kind: str, shape: tuple[int, ...]) -> Tensor:
        whole = torch.empty(shape, dtype=self._options.dtype, device=self._options.device)
        for name, part in zip(self._names, torch.split(whole, list(self._rows)), strict=True):
            if self._transposed and part.dim() == 2:
                stored = torch.empty(part.shape[::-1], dtype=part.dtype, device=part.device)
                checkpoint.read(f"{name}.{kind}", stored)
                part.copy_(stored.T)
            else:
                checkpoint.read(f"{name}.{kind}", part)
        return whole
