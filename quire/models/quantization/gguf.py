"""Weights of a GGUF file, each module in a type of its own.

A processor multiplies with the blocks of the file. On a GPU they become weights of our other schemes (gguf_coded.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from quire.compute.gguf.tensor_types import QUANTIZED
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.gguf_blocks import BlockWeight
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.models.quantization.coded_experts import ExpertLoop
from quire.models.quantization.dense import DenseEmbedding, DenseWeight, dense_specs
from quire.models.quantization.formats import GgufFormat
from quire.models.quantization.gguf_coded import CodedPart, GgufExperts, types_of
from quire.models.quantization.scheme import (
    EmbeddingShape,
    EmbeddingWeight,
    ExpertsShape,
    ExpertWeights,
    LinearShape,
    LinearWeight,
    RowForm,
)
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions

_DENSE = ""
"""The name of weights that are dequantized into the model's dtype, in place of a type's."""


class Gguf:
    """The scheme of GgufFormat."""

    def __init__(self, form: GgufFormat) -> None:
        self._form = form

    def linear(self, shape: LinearShape, options: TensorOptions) -> LinearWeight:
        return GgufLinearWeight(self._form, shape, options)

    def embedding(self, shape: EmbeddingShape, options: TensorOptions) -> EmbeddingWeight:
        return GgufEmbedding(shape, options) if options.device.type == "cpu" else DenseEmbedding(shape, options)

    def experts(self, shape: ExpertsShape, options: TensorOptions) -> ExpertWeights:
        return (
            ExpertLoop(self.linear, shape, options)
            if options.device.type == "cpu"
            else GgufExperts(self._form, shape, options)
        )


class GgufLinearWeight:
    """A LinearWeight of a GGUF file: parts of one type each, one below the other."""

    library_product: str | None = None
    row_form: RowForm | None = None

    def __init__(self, form: GgufFormat, shape: LinearShape, options: TensorOptions) -> None:
        self._form = form
        self._shape = shape
        self._options = options
        self._block_part = _BlockPart if options.device.type == "cpu" else CodedPart
        self._silu_and_mul = kernel("silu_and_mul", options.device.type)
        self._parts: list[_Part]

    def weight_specs(self) -> Iterator[WeightSpec]:
        for spec in dense_specs(self._shape):
            yield replace(spec, divisible=False)  # who reads blocks counts bytes, not columns

    def load(self, checkpoint: Checkpoint) -> None:
        contents = checkpoint.contents()
        if not contents:  # the compile warm-up's: whatever type a module has, its kernels are launched
            coded = (CodedPart(self._shape, name, self._options) for name in types_of(self._form))
            self._parts = [*coded, _DensePart(self._shape, self._options)]
            for each in self._parts:
                each.load(checkpoint)
            return
        modules = list(zip(self._shape.names, self._shape.rows, strict=True))
        self._parts = []
        for name, run in groupby(modules, lambda module: _type_of(contents[f"{module[0]}.weight"].dtype)):
            names, rows = zip(*run, strict=True)
            part: _Part
            if name == _DENSE:
                part = _DensePart(LinearShape(names, rows, self._shape.columns), self._options)
            else:
                part = self._block_part(LinearShape(names, rows, self._shape.columns), name, self._options)
            part.load(checkpoint)
            self._parts.append(part)

    def multiply(self, x: Rows, bias: Tensor | None) -> Tensor:
        assert isinstance(x, Tensor)
        y = x.new_empty((x.shape[0], self._shape.outputs))
        if self._parts[0].outputs == self._shape.outputs:
            for part in self._parts:
                part.multiply(x, bias, y)
            return y
        begin = 0
        for part in self._parts:
            rows = slice(begin, begin + part.outputs)
            part.multiply(x, None if bias is None else bias[rows], y[:, rows])
            begin += part.outputs
        return y

    def multiply_silu_and_mul(self, x: Rows, bias: Tensor | None) -> Tensor:
        assert isinstance(x, Tensor)
        out = x.new_empty((x.shape[0], self._shape.outputs // 2))
        if self._parts[0].outputs == self._shape.outputs:
            for part in self._parts:
                part.multiply_silu_and_mul(x, bias, out)
        else:
            self._silu_and_mul(self.multiply(x, bias), out)
        return out


class _DensePart:
    """Modules whose weights are dequantized into the model's dtype."""

    def __init__(self, shape: LinearShape, options: TensorOptions) -> None:
        self.outputs = shape.outputs
        self._weight = DenseWeight(shape, options)

    def load(self, checkpoint: Checkpoint) -> None:
        self._weight.load(checkpoint)

    def multiply(self, x: Tensor, bias: Tensor | None, y: Tensor) -> None:
        y.copy_(self._weight.multiply(x, bias))

    def multiply_silu_and_mul(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        out.copy_(self._weight.multiply_silu_and_mul(x, bias))


class _BlockPart:
    """Modules whose weights stay in the file's blocks, all of one type."""

    def __init__(self, shape: LinearShape, name: str, options: TensorOptions) -> None:
        self.outputs = shape.outputs
        self._shape = shape
        self._name = name
        self._options = options
        device = options.device.type
        self._linear = kernel("block_linear", device)
        self._linear_silu_and_mul = kernel("block_linear_silu_and_mul", device)
        self._weight: BlockWeight

    def load(self, checkpoint: Checkpoint) -> None:
        self._weight = read_blocks(self._shape, self._name, checkpoint, self._options)

    def multiply(self, x: Tensor, bias: Tensor | None, y: Tensor) -> None:
        self._linear(x, self._weight, bias, y)

    def multiply_silu_and_mul(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        self._linear_silu_and_mul(x, self._weight, bias, out)


_Part = _DensePart | _BlockPart | CodedPart
"""The weights of some of a shape's modules, all in one form; see CodedPart."""


class GgufEmbedding:
    """An EmbeddingWeight of a GGUF file: in the file's blocks if a head multiplies with it too, otherwise dense."""

    def __init__(self, shape: EmbeddingShape, options: TensorOptions) -> None:
        self._shape = LinearShape((shape.name,), (shape.count,), shape.width)
        self._options = options
        self._dense = DenseEmbedding(shape, options)
        self._embed = kernel("block_embed", options.device.type)
        self._linear = kernel("block_linear", options.device.type)
        self._tied = False
        self._blocks: BlockWeight | None = None

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield from self._dense.weight_specs()

    def tie(self) -> None:
        self._tied = True
        self._dense.tie()

    def load(self, checkpoint: Checkpoint) -> None:
        name = _type_of(checkpoint.contents()[f"{self._shape.names[0]}.weight"].dtype)
        if self._tied and name != _DENSE:
            self._blocks = read_blocks(self._shape, name, checkpoint, self._options)
        else:
            self._dense.load(checkpoint)

    def take(self, tokens: Tensor, scale: float | None, out: Tensor) -> None:
        if self._blocks is None:
            self._dense.take(tokens, scale, out)
        else:
            self._embed(tokens, self._blocks, scale, out)

    def multiply(self, x: Tensor) -> Tensor:
        if self._blocks is None:
            return self._dense.multiply(x)
        y = x.new_empty((x.shape[0], self._shape.outputs))
        self._linear(x, self._blocks, None, y)
        return y


def read_blocks(shape: LinearShape, name: str, checkpoint: Checkpoint, options: TensorOptions) -> BlockWeight:
    """Read the modules' weights, all of type `name`, one below the other, and pack them."""
    form = QUANTIZED[name]
    pack = kernel("pack_blocks", options.device.type)

    def read() -> Tensor:
        row_bytes = shape.columns // form.block * form.block_bytes
        blocks = torch.empty((shape.outputs, row_bytes), dtype=torch.uint8, device=options.device)
        for module, part in zip(shape.names, torch.split(blocks, list(shape.rows)), strict=True):
            checkpoint.read(f"{module}.weight", part)
        packed: Tensor = pack(blocks, name)
        return packed

    what = f"blocks {name} {shape.names} {shape.rows} × {shape.columns}"
    return BlockWeight(options.packed_weights.get(what, read), name, shape.outputs, shape.columns)


def _type_of(dtype: str) -> str:
    """Return the type's name if there are products with its blocks, otherwise _DENSE."""
    return dtype if dtype in QUANTIZED else _DENSE
