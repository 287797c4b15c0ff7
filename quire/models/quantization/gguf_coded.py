"""Weights of a GGUF file on a GPU: as those of our other schemes, integers in groups or codes of sixteen values.

weight = d · s · (value(code) - zero) - dmin · m becomes scale · (code - zero): codes of 4 bits stay 4 bits, all others
take 8. Scales are d, in fp16, or d · s in fp32, both exact. A group's minimum becomes a zero that is no integer, fp16:
11 bits of it, where weights in bf16 keep 8 bits of each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.compute.gguf.tensor_types import QUANTIZED
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.experts import Coded, ExpertAdapters, stack_weights
from quire.compute.kernels.reference.gguf_blocks import Unpacked, unpack
from quire.compute.kernels.reference.linear import CodebookWeight, GroupedWeight, pack_codebook, pack_grouped
from quire.models.quantization.dense import DenseExperts
from quire.models.quantization.formats import GgufFormat
from quire.models.quantization.kernel_experts import KernelExperts
from quire.models.quantization.scheme import ExpertsShape, LinearShape
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions

_LARGEST_ZERO = 1 << 14
"""If a group's minimum is larger than this many scales, fp16 cannot tell its weights from the minimum."""


class CodedPart:
    """The weights of some of a shape's modules, all of one type, as codes with scales on a GPU.

    Attributes:
        outputs: How many outputs these modules have together.
    """

    def __init__(self, shape: LinearShape, name: str, options: TensorOptions) -> None:
        self.outputs = shape.outputs
        self._shape = shape
        self._name = name
        self._options = options
        op = "codebook_linear" if QUANTIZED[name].nonlinear else "grouped_linear"
        self._linear = kernel(op, options.device.type)
        self._linear_silu_and_mul = kernel(f"{op}_silu_and_mul", options.device.type)
        self._weight: GroupedWeight | CodebookWeight

    def load(self, checkpoint: Checkpoint) -> None:
        self._weight = read_coded(self._shape, self._name, checkpoint, self._options.device)

    def multiply(self, x: Tensor, bias: Tensor | None, y: Tensor) -> None:
        """Write x Wᵀ + bias to y: x [tokens, columns], y [tokens, outputs]."""
        y.copy_(self._linear(x, self._weight, bias))

    def multiply_silu_and_mul(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Write silu of the first half of x Wᵀ + bias times the second half to out [tokens, outputs / 2]."""
        self._linear_silu_and_mul(x, self._weight, bias, out)


class StackedBlocks(KernelExperts):
    """ExpertWeights of a GGUF file whose gates and ups have one type, and whose downs have one, maybe another."""

    def __init__(self, types: tuple[str, str], shape: ExpertsShape, options: TensorOptions) -> None:
        super().__init__("coded_experts", shape, options)
        self._types = types

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield from DenseExperts(self._shape, self._options).weight_specs()

    def load(self, checkpoint: Checkpoint) -> None:
        device, shapes = self._options.device, [self._shape.products(number) for number in self._shape.numbers]

        def stacked(product: int) -> Coded:
            name = self._types[product]
            return stack_weights(
                len(shapes), lambda index: read_coded(shapes[index][product], name, checkpoint, device)
            )

        self._stacks = stacked(0), stacked(1)


class GgufExperts:
    """ExpertWeights of a GGUF file on a GPU: codes, or dense if a projection has several types or is not quantized."""

    def __init__(self, form: GgufFormat, shape: ExpertsShape, options: TensorOptions) -> None:
        self._form = form
        self._shape = shape
        self._options = options
        self._dense = DenseExperts(shape, options)
        self._ways: list[StackedBlocks | DenseExperts]

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield from self._dense.weight_specs()

    def load(self, checkpoint: Checkpoint) -> None:
        self._ways = list(self._ways_for(checkpoint))
        for way in self._ways:
            way.load(checkpoint)

    def multiply(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        return [way.multiply(x, numbers, weights) for way in self._ways][-1]

    def multiply_adapted(self, x: Tensor, numbers: Tensor, weights: Tensor, adapters: ExpertAdapters) -> Tensor:
        return [way.multiply_adapted(x, numbers, weights, adapters) for way in self._ways][-1]

    def _ways_for(self, checkpoint: Checkpoint) -> Iterator[StackedBlocks | DenseExperts]:
        """Yield the form that the experts are kept in; in the compile warm-up, whose checkpoint is empty, all forms."""
        contents, names = checkpoint.contents(), self._shape.names
        if not contents:
            for name in types_of(self._form):
                yield StackedBlocks((name, name), self._shape, self._options)
            yield self._dense
            return
        gates, downs = (
            {contents[f"{self._shape.name}.{n}.{p}.weight"].dtype for n in self._shape.numbers for p in projections}
            for projections in (names.first, (names.down,))
        )
        if len(gates) == len(downs) == 1 and gates | downs <= QUANTIZED.keys():
            yield StackedBlocks((gates.pop(), downs.pop()), self._shape, self._options)
        else:
            yield self._dense


_Coded = GroupedWeight | CodebookWeight


def types_of(form: GgufFormat) -> list[str]:
    """Return the quantized types of a file's tensors."""
    return [name for name, _ in form.types if name in QUANTIZED]


def read_coded(shape: LinearShape, name: str, checkpoint: Checkpoint, device: torch.device) -> _Coded:
    """Read the modules' weights, all of type `name`, one below the other; uninitialised if the checkpoint is empty."""
    if not checkpoint.contents():
        return _uninitialised(shape, name, device)
    form = QUANTIZED[name]
    blocks = torch.empty((shape.outputs, shape.columns // form.block * form.block_bytes), dtype=torch.uint8)
    for module, part in zip(shape.names, torch.split(blocks, list(shape.rows)), strict=True):
        checkpoint.read(f"{module}.weight", part)
    weight = coded_weight(blocks, name)
    return _on(device, weight)


def coded_weight(blocks: Tensor, name: str) -> _Coded:
    """Convert blocks [rows, bytes of a row] uint8 of type `name` to a weight of codes and scales."""
    form, parts = QUANTIZED[name], unpack(blocks, name)
    scales = _of_groups(parts.d, parts.s, form.block // form.group)
    kept = _scale_dtype(name)
    if form.nonlinear:
        return pack_codebook(parts.codes, scales.to(kept), None, "iq4", form.group)
    bits = form.coded_bits
    codes = parts.codes.view(torch.uint8)
    if parts.dmin is None:
        middle = 1 << (bits - 1)
        codes = codes ^ middle if parts.codes.dtype == torch.int8 else codes + (middle - form.zero)
        return pack_grouped(codes, scales.to(kept), None, bits, form.group, None)
    codes, scales, zeros = _with_zeros(codes, scales, parts, form.group)
    return pack_grouped(codes, scales.to(kept), zeros.to(torch.float16), bits, form.group, None)


def _with_zeros(codes: Tensor, scales: Tensor, parts: Unpacked, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and zeros of groups that have minima.

    A group whose weights all equal its minimum gets codes 0, the zero 1, and the minimum as its scale.
    """
    assert parts.dmin is not None
    minima = _of_groups(parts.dmin, parts.m, scales.shape[1] // parts.dmin.shape[1])
    constant = minima.abs() > _LARGEST_ZERO * scales.abs()
    codes = codes.view(len(codes), -1, group).masked_fill(constant.unsqueeze(-1), 0).flatten(1)
    scales = torch.where(constant, minima, scales)
    zeros = torch.where(constant, 1.0, minima / torch.where(scales == 0, 1.0, scales))
    return codes, scales, zeros


def _of_groups(d: Tensor, s: Tensor | None, groups: int) -> Tensor:
    """Multiply each block's number in d [rows, blocks] by each group's in s [rows, groups]: [rows, groups] fp32."""
    wide = d.float().repeat_interleave(groups, 1)
    return wide if s is None else wide * s.float()


def _on(device: torch.device, weight: _Coded) -> _Coded:
    packed, scales = weight.packed.to(device), weight.scales.to(device)
    if isinstance(weight, CodebookWeight):
        return weight._replace(packed=packed, scales=scales, table=weight.table.to(device))
    return weight._replace(
        packed=packed, scales=scales, zeros=None if weight.zeros is None else weight.zeros.to(device)
    )


def _uninitialised(shape: LinearShape, name: str, device: torch.device) -> _Coded:
    """Return a weight of the shape that `read_coded` returns, with undefined contents."""
    form, rows = QUANTIZED[name], shape.outputs
    bits, groups = form.coded_bits, shape.columns // form.group
    packed = torch.empty((rows, shape.columns * bits // 8), dtype=torch.uint8, device=device)
    scales = torch.empty((rows, groups), dtype=_scale_dtype(name), device=device)
    if form.nonlinear:
        return CodebookWeight(packed, scales, None, torch.empty(16, device=device), form.group, "iq4")
    zeros = torch.empty((rows, groups), dtype=torch.float16, device=device) if form.has_minimum else None
    return GroupedWeight(packed, scales, zeros, bits, form.group, None)


def _scale_dtype(name: str) -> torch.dtype:
    return torch.float32 if QUANTIZED[name].has_groups else torch.float16
