"""Experts as gpt-oss's checkpoints store them: all of a layer in one tensor, with gates and ups by turns, and biases.

In the model's dtype, a weight is [experts, columns, rows]. As mxfp4 it is [experts, rows, groups, 16] bytes, each of two
codes, and [experts, rows, groups] exponents of scales; the codes are what is kept in memory, on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.experts import ExpertBiases, experts, stack_weights
from quire.compute.kernels.reference.linear import CodebookWeight, pack_codebook
from quire.errors import CheckpointError
from quire.models.quantization.formats import MICROSCALED, CodebookFormat
from quire.models.quantization.kernel_experts import KernelExperts
from quire.models.quantization.scheme import ExpertsShape, ExpertWeights
from quire.models.weights.checkpoint import Checkpoint, DummyValues, WeightSpec
from quire.models.weights.tensor_options import TensorOptions

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
_LARGEST = 6
"""The largest value of e2m1."""
_BYTES = ("U8",)


def interleaved_codes(form: Any, shape: ExpertsShape, options: TensorOptions) -> ExpertWeights:
    """Make experts of codes.

    Raises:
        CheckpointError: The format is not mxfp4, or does not suit the shape.
    """
    if not isinstance(form, CodebookFormat) or form.layout != "mxfp4":
        raise CheckpointError(
            f"{shape.name}: these experts are served in mxfp4 and in bf16: use the model's mxfp4 or bf16 checkpoint "
            "without --quantization.",
            param="quantization",
        )
    if shape.hidden % MICROSCALED or shape.width % MICROSCALED:
        raise CheckpointError(
            f"{shape.name}: experts of {shape.hidden} × {shape.width} as mxfp4 are not supported: {MICROSCALED} must "
            "divide both. Lower --tensor-parallel-size or give --enable-expert-parallel, or use the bf16 checkpoint.",
            param="quantization_config",
        )
    return MxfpExpertLoop(shape, options) if options.device.type == "cpu" else MxfpExperts(shape, options)


class InterleavedExperts(KernelExperts):
    """ExpertWeights in the model's dtype."""

    def __init__(self, shape: ExpertsShape, options: TensorOptions) -> None:
        super().__init__("experts", shape, options)
        self._pack = kernel("pack_experts", options.device.type)

    def weight_specs(self) -> Iterator[WeightSpec]:
        count, hidden, width = self._shape.count, self._shape.hidden, self._shape.width
        yield WeightSpec(f"{self._shape.name}.{_GATE_UP}", (count, hidden, 2 * width))
        yield WeightSpec(f"{self._shape.name}.{_DOWN}", (count, width, hidden))
        yield from bias_specs(self._shape)

    def load(self, checkpoint: Checkpoint) -> None:
        hidden, width = self._shape.hidden, self._shape.width
        gate_up = self._weights(checkpoint, _GATE_UP, 2 * width, hidden, apart)
        self._stacks = gate_up, self._weights(checkpoint, _DOWN, hidden, width, lambda weight: weight)
        self._biases = read_biases(checkpoint, self._shape, self._options)

    def _weights(
        self, checkpoint: Checkpoint, projection: str, rows: int, columns: int, order: Callable[[Tensor], Tensor]
    ) -> Any:
        """Read and pack one projection of all experts, with its rows in this order."""
        shape, options, name = self._shape, self._options, f"{self._shape.name}.{projection}"

        def read() -> Any:
            stacked = torch.empty((shape.count, rows, columns), dtype=options.dtype, device=options.device)
            for number, weight in zip(shape.numbers, stacked, strict=True):
                stored = torch.empty((1, columns, rows), dtype=options.dtype, device=options.device)
                checkpoint.read(name, stored, (number, 0, 0))
                weight.copy_(order(stored[0].T))
            return self._pack(stacked)

        return options.packed_weights.get(f"experts {name} {shape.numbers} {rows} × {columns}", read)


class _MxfpParts:
    """Reads experts in mxfp4 one by one."""

    def __init__(self, shape: ExpertsShape, options: TensorOptions) -> None:
        self._shape = shape
        self._device = options.device

    def weight_specs(self) -> Iterator[WeightSpec]:
        hidden, width, dummy = self._shape.hidden, self._shape.width, DummyValues("exponents", _LARGEST)
        for projection, rows, columns in ((_GATE_UP, 2 * width, hidden), (_DOWN, hidden, width)):
            shape, name = (self._shape.count, rows, columns // MICROSCALED), f"{self._shape.name}.{projection}"
            yield WeightSpec(f"{name}_blocks", (*shape, MICROSCALED // 2), _BYTES)
            yield WeightSpec(f"{name}_scales", shape, _BYTES, dummy=dummy)
        yield from bias_specs(self._shape)

    def gate_up(self, checkpoint: Checkpoint, number: int) -> tuple[Tensor, Tensor]:
        """Read codes [2 · width, hidden], one to a byte, and scales [2 · width, groups]: gates, then ups."""
        blocks, scales = self._read(checkpoint, _GATE_UP, number, 2 * self._shape.width, self._shape.hidden)
        return _codes(apart(blocks)), apart(scales).view(torch.float8_e8m0fnu)

    def down(self, checkpoint: Checkpoint, number: int) -> tuple[Tensor, Tensor]:
        """Read codes [hidden, width] and scales [hidden, groups], as `gate_up` does."""
        blocks, scales = self._read(checkpoint, _DOWN, number, self._shape.hidden, self._shape.width)
        return _codes(blocks), scales.view(torch.float8_e8m0fnu)

    def _read(
        self, checkpoint: Checkpoint, projection: str, number: int, rows: int, columns: int
    ) -> tuple[Tensor, Tensor]:
        name, shape = f"{self._shape.name}.{projection}", (1, rows, columns // MICROSCALED)
        blocks = torch.empty((*shape, MICROSCALED // 2), dtype=torch.uint8, device=self._device)
        scales = torch.empty(shape, dtype=torch.uint8, device=self._device)
        checkpoint.read(f"{name}_blocks", blocks, (number, 0, 0, 0))
        checkpoint.read(f"{name}_scales", scales, (number, 0, 0))
        return blocks[0], scales[0]


class MxfpExperts(KernelExperts):
    """ExpertWeights in mxfp4 on a GPU, stacked into one product that expands codes itself."""

    def __init__(self, shape: ExpertsShape, options: TensorOptions) -> None:
        super().__init__("coded_experts", shape, options)
        self._parts = _MxfpParts(shape, options)

    def weight_specs(self) -> Iterator[WeightSpec]:
        return self._parts.weight_specs()

    def load(self, checkpoint: Checkpoint) -> None:
        numbers = self._shape.numbers

        def stack(read: Callable[[Checkpoint, int], tuple[Tensor, Tensor]]) -> CodebookWeight:
            def weight_of(place: int) -> CodebookWeight:
                codes, scales = read(checkpoint, numbers[place])
                return pack_codebook(codes, scales, None, "e2m1", MICROSCALED)

            stacked = stack_weights(len(numbers), weight_of)
            assert isinstance(stacked, CodebookWeight)
            return stacked

        self._stacks = stack(self._parts.gate_up), stack(self._parts.down)
        self._biases = read_biases(checkpoint, self._shape, self._options)


class MxfpExpertLoop:
    """ExpertWeights in mxfp4 on a CPU, computed one expert after the other."""

    def __init__(self, shape: ExpertsShape, options: TensorOptions) -> None:
        self._shape = shape
        self._options = options
        self._parts = _MxfpParts(shape, options)
        self._pack = kernel("pack_codebook", "cpu")
        self._linear = kernel("codebook_linear", "cpu")
        self._gate_up: list[Any]
        self._down: list[Any]
        self._biases: ExpertBiases | None = None

    def weight_specs(self) -> Iterator[WeightSpec]:
        return self._parts.weight_specs()

    def load(self, checkpoint: Checkpoint) -> None:
        packed = self._options.packed_weights

        def loaded(read: Callable[[Checkpoint, int], tuple[Tensor, Tensor]]) -> list[Any]:
            return [self._pack(*read(checkpoint, n), None, "e2m1", MICROSCALED) for n in self._shape.numbers]

        name = f"mxfp4 {self._shape.name} {self._shape.numbers} {self._shape.width}"
        self._gate_up = packed.get(f"{name} {_GATE_UP}", lambda: loaded(self._parts.gate_up))
        self._down = packed.get(f"{name} {_DOWN}", lambda: loaded(self._parts.down))
        self._biases = read_biases(checkpoint, self._shape, self._options)

    def multiply(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        out, terms = torch.empty_like(x), {"activation": self._shape.activation, "biases": self._biases}
        experts(x, self._gate_up, self._down, numbers, weights, out, linear=self._linear, **terms)
        return out


def bias_specs(shape: ExpertsShape) -> Iterator[WeightSpec]:
    """Yield the specs of the biases of all experts, if they have any."""
    if shape.biases:
        yield WeightSpec(f"{shape.name}.{_GATE_UP}_bias", (shape.count, 2 * shape.width))
        yield WeightSpec(f"{shape.name}.{_DOWN}_bias", (shape.count, shape.hidden))


def read_biases(checkpoint: Checkpoint, shape: ExpertsShape, options: TensorOptions) -> ExpertBiases | None:
    """Read the biases of this rank's experts; None: they have none."""
    if not shape.biases:
        return None
    gate_up = torch.empty((shape.count, 2 * shape.width), dtype=options.dtype, device=options.device)
    checkpoint.read(f"{shape.name}.{_GATE_UP}_bias", gate_up, (shape.first, 0))
    gate_up = apart(gate_up.T).T.contiguous()
    if not shape.adds_bias:
        return ExpertBiases(gate_up, None)
    down = gate_up.new_empty((shape.count, shape.hidden))
    checkpoint.read(f"{shape.name}.{_DOWN}_bias", down, (shape.first, 0))
    return ExpertBiases(gate_up, down)


def apart(rows: Tensor) -> Tensor:
    """Return rows of gates and ups, which come by turns, as all gates, then all ups."""
    return torch.cat((rows[0::2], rows[1::2]))


def _codes(blocks: Tensor) -> Tensor:
    """Return the codes of blocks [rows, groups, 16] one by one: [rows, columns] uint8. A byte's low bits come first."""
    return torch.stack((blocks & 15, blocks >> 4), 3).flatten(1)
