"""Weights as they are: of the model's dtype, in the layout that a device's kernels want."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.lora import LowRankWeights, Tiles
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.compute.mesh import Span
from quire.models.quantization.kernel_experts import KernelExperts, bias_specs, read_biases, with_bias
from quire.models.quantization.scheme import EmbeddingShape, ExpertsShape, LinearShape, RowForm
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions


class Dense:
    """The scheme of checkpoints that say nothing of quantization."""

    def linear(self, shape: LinearShape, options: TensorOptions) -> DenseWeight:
        return DenseWeight(shape, options)

    def embedding(self, shape: EmbeddingShape, options: TensorOptions) -> DenseEmbedding:
        return DenseEmbedding(shape, options)

    def experts(self, shape: ExpertsShape, options: TensorOptions) -> DenseExperts:
        return DenseExperts(shape, options)


class KernelWeight:
    """The products of a LinearWeight: the op `op` and its `…_silu_and_mul`, of a weight in the form that they take."""

    library_product: str | None = None
    row_form: RowForm | None = None

    def __init__(self, op: str, shape: LinearShape, options: TensorOptions) -> None:
        self._shape = shape
        self._options = options
        self._linear = kernel(op, options.device.type)
        self._linear_silu_and_mul = kernel(f"{op}_silu_and_mul", options.device.type)
        self._weight: Any

    def multiply(self, x: Rows, bias: Tensor | None) -> Tensor:
        y: Tensor = self._linear(x, self._weight, bias)
        return y

    def multiply_silu_and_mul(self, x: Rows, bias: Tensor | None) -> Tensor:
        out = x.new_empty((x.shape[0], self._shape.outputs // 2))
        self._linear_silu_and_mul(x, self._weight, bias, out)
        return out


class DenseWeight(KernelWeight):
    """A LinearWeight in the model's dtype."""

    library_product: str | None = "linear"

    def __init__(self, shape: LinearShape, options: TensorOptions) -> None:
        super().__init__("linear", shape, options)
        self._packing = "pack_rounded" if options.many_rows else "pack_linear"
        self._pack = kernel(self._packing, options.device.type)
        self._linear_and_shrink = kernel("linear_and_shrink", options.device.type)
        if options.device.type == "cuda" and options.dtype != torch.float32:
            self.row_form = RowForm(None, norms_one=True)

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield from dense_specs(self._shape)

    def load(self, checkpoint: Checkpoint) -> None:
        shape = self._shape
        name = f"linear {shape.names} {shape.rows} × {shape.columns} {self._packing}"
        self._weight = self._options.packed_weights.get(
            name, lambda: self._pack(read_dense(shape, checkpoint, self._options))
        )

    def read_values(self, checkpoint: Checkpoint) -> Tensor:
        return read_dense(self._shape, checkpoint, self._options)

    def multiply_and_shrink(
        self, x: Tensor, bias: Tensor | None, weights: LowRankWeights, tiles: Tiles
    ) -> tuple[Tensor, Tensor]:
        both: tuple[Tensor, Tensor] = self._linear_and_shrink(x, self._weight, bias, weights, tiles)
        return both


def dense_specs(shape: LinearShape) -> Iterator[WeightSpec]:
    """Yield the specs of the dense weights of a shape's modules."""
    for name, rows in zip(shape.names, shape.rows, strict=True):
        yield WeightSpec(f"{name}.weight", (shape.columns, rows) if shape.transposed else (rows, shape.columns))


def read_dense(shape: LinearShape, checkpoint: Checkpoint, options: TensorOptions) -> Tensor:
    """Read the modules' weights, one below the other: [outputs, columns] of the options' dtype."""
    whole = torch.empty((shape.outputs, shape.columns), dtype=options.dtype, device=options.device)
    for name, part in zip(shape.names, torch.split(whole, list(shape.rows)), strict=True):
        if shape.transposed:
            stored = torch.empty(part.shape[::-1], dtype=part.dtype, device=part.device)
            checkpoint.read(f"{name}.weight", stored)
            part.copy_(stored.T)
        else:
            checkpoint.read(f"{name}.weight", part)
    return whole


def read_tensor(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Read a whole tensor."""
    out = torch.empty(shape, dtype=dtype, device=device)
    checkpoint.read(name, out)
    return out


class DenseEmbedding:
    """An EmbeddingWeight in the model's dtype.

    Args:
        shape: The shape of the whole weight.
        options: The device and dtype.
        part: This rank's rows, behind which the weight gets a row of zeros for all others; None: it has all rows.

    Attributes:
        data: The loaded weight in the layout that the kernel `embed` takes.
    """

    def __init__(self, shape: EmbeddingShape, options: TensorOptions, part: Span | None = None) -> None:
        self._spec = WeightSpec(f"{shape.name}.weight", (shape.count, shape.width))
        self._options = options
        self._part = part
        self._embed = kernel("embed", options.device.type)
        self._linear = kernel("linear", options.device.type)
        self._pack: Callable[[Tensor], Any] | None = None
        self.data: Any

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield self._spec

    def tie(self) -> None:
        self._pack = kernel("pack_tied", self._options.device.type)

    def load(self, checkpoint: Checkpoint) -> None:
        kind = "embedding" if self._pack is None else "tied embedding"
        name = f"{kind} {self._spec.name} {self._spec.shape}{'' if self._part is None else f' {self._part}'}"
        self.data = self._options.packed_weights.get(name, lambda: self._read(checkpoint))

    def take(self, tokens: Tensor, scale: float | None, out: Tensor) -> None:
        self._embed(tokens, self.data, scale, out)

    def multiply(self, x: Tensor) -> Tensor:
        logits: Tensor = self._linear(x, self.data, None)
        return logits

    def _read(self, checkpoint: Checkpoint) -> Any:
        count, width = self._spec.shape
        begin, own, zeros = (0, count, 0) if self._part is None else (self._part.start, self._part.count, 1)
        weight = torch.empty((own + zeros, width), dtype=self._options.dtype, device=self._options.device)
        weight[own:].zero_()
        checkpoint.read(self._spec.name, weight[:own], (begin, 0))
        return weight if self._pack is None else self._pack(weight)


class DenseExperts(KernelExperts):
    """ExpertWeights in the model's dtype, also for adapters of experts."""

    def __init__(self, shape: ExpertsShape, options: TensorOptions) -> None:
        super().__init__("experts", shape, options)
        self._pack = kernel("pack_experts", options.device.type)

    def weight_specs(self) -> Iterator[WeightSpec]:
        shape = self._shape
        for number in shape.numbers:
            for projection in shape.names.first:
                yield WeightSpec(f"{shape.name}.{number}.{projection}.weight", (shape.width, shape.hidden))
            yield WeightSpec(f"{shape.name}.{number}.{shape.names.down}.weight", (shape.hidden, shape.width))
        yield from bias_specs(shape)

    def load(self, checkpoint: Checkpoint) -> None:
        shape, names = self._shape, self._shape.names
        gate_up = self._load(checkpoint, names.first, shape.width, shape.hidden)
        self._stacks = gate_up, self._load(checkpoint, (names.down,), shape.hidden, shape.width)
        self._biases = read_biases(checkpoint, shape, self._options)

    def gate_up(self, number: int, x: Tensor) -> Tensor:
        biases = self._biases and self._biases.gate_up
        return with_bias(self._multiply_one(x, self._stacks[0], number), biases, number)

    def down(self, number: int, x: Tensor) -> Tensor:
        biases = self._biases and self._biases.down
        return with_bias(self._multiply_one(x, self._stacks[1], number), biases, number)

    def _multiply_one(self, x: Tensor, weights: Sequence[Tensor] | Tensor, number: int) -> Tensor:
        y: Tensor = kernel("expert_linear", self._options.device.type)(x, weights, number)
        return y

    def _load(
        self, checkpoint: Checkpoint, projections: tuple[str, ...], rows: int, columns: int
    ) -> Sequence[Tensor] | Tensor:
        """Read and pack these projections of all experts, in each expert [rows, columns] one below the other."""
        name, options = self._shape.name, self._options

        def read() -> Sequence[Tensor] | Tensor:
            shape = (self._shape.count, len(projections), rows, columns)
            stacked = torch.empty(shape, dtype=options.dtype, device=options.device)
            for number, expert in zip(self._shape.numbers, stacked, strict=True):
                for projection, part in zip(projections, expert, strict=True):
                    checkpoint.read(f"{name}.{number}.{projection}.weight", part)
            packed: Sequence[Tensor] | Tensor = self._pack(stacked.flatten(1, 2))
            return packed

        return options.packed_weights.get(
            f"experts {name} {self._shape.numbers} {projections} {rows} × {columns}", read
        )
