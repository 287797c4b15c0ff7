"""The scheme of codes, and experts of any scheme: on a processor one after the other, each three linear weights; on a
GPU stacked for a product that expands codes itself.

How many tokens an expert has is known only to the device, so one after the other serves processors alone. The stack
takes as much memory as the codes and scales of all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.experts import Coded, ExpertBiases, experts, stack_weights
from quire.compute.kernels.reference.linear import GroupedWeight
from quire.errors import CheckpointError
from quire.models.quantization.kernel_experts import KernelExperts, bias_specs, read_biases, with_bias
from quire.models.quantization.scheme import ExpertsShape, ExpertWeights, LinearShape, LinearWeight
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions

W = TypeVar("W", bound=LinearWeight)
MakeWeight = Callable[[LinearShape, TensorOptions], W]
"""Makes the weight of a matrix product, not loaded yet."""


class CodedLinearWeight(LinearWeight, Protocol):
    """A LinearWeight of codes."""

    def read(self, checkpoint: Checkpoint) -> Coded:
        """Read the weight in the form of the reference kernels."""
        ...


class CodedScheme:
    """The WeightScheme of a format whose linear weights are of the class `weight`."""

    def __init__(self, weight: Callable[[Any, LinearShape, TensorOptions], CodedLinearWeight], form: object) -> None:
        self._weight = weight
        self._form = form

    def linear(self, shape: LinearShape, options: TensorOptions) -> CodedLinearWeight:
        return self._weight(self._form, shape, options)

    def experts(self, shape: ExpertsShape, options: TensorOptions) -> ExpertWeights:
        kind = ExpertLoop if options.device.type == "cpu" else StackedExperts
        return kind(self.linear, shape, options)


class ExpertLoop:
    """ExpertWeights that compute one expert after the other, each by its linear weights."""

    def __init__(self, linear: MakeWeight[LinearWeight], shape: ExpertsShape, options: TensorOptions) -> None:
        self._shape = shape
        self._options = options
        self._gate_up, self._down = _weights_of(linear, shape, options)
        self._biases: ExpertBiases | None = None

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield from _specs_of(self._gate_up, self._down)
        yield from bias_specs(self._shape)

    def load(self, checkpoint: Checkpoint) -> None:
        for weight in (*self._gate_up, *self._down):
            weight.load(checkpoint)
        self._biases = read_biases(checkpoint, self._shape, self._options)

    def multiply(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        out, activation, biases = torch.empty_like(x), self._shape.activation, self._biases
        both = self._gate_up, self._down
        experts(x, *both, numbers, weights, out, activation=activation, biases=biases, linear=_multiply)
        return out

    def gate_up(self, number: int, x: Tensor) -> Tensor:
        return with_bias(self._gate_up[number].multiply(x, None), self._biases and self._biases.gate_up, number)

    def down(self, number: int, x: Tensor) -> Tensor:
        return with_bias(self._down[number].multiply(x, None), self._biases and self._biases.down, number)


def _multiply(x: Tensor, weight: LinearWeight, bias: None) -> Tensor:
    return weight.multiply(x, bias)


class StackedExperts(KernelExperts):
    """ExpertWeights of any coded scheme, stacked into one product for a GPU."""

    def __init__(self, linear: MakeWeight[CodedLinearWeight], shape: ExpertsShape, options: TensorOptions) -> None:
        super().__init__("coded_experts", shape, options)
        self._gate_up, self._down = _weights_of(linear, shape, options)
        self._pack = kernel("pack_coded_experts", options.device.type)

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield from _specs_of(self._gate_up, self._down)
        yield from bias_specs(self._shape)

    def load(self, checkpoint: Checkpoint) -> None:
        gate_up = self._pack(self._stacked(self._gate_up, checkpoint), True, self._options.dtype)
        self._stacks = gate_up, self._pack(self._stacked(self._down, checkpoint), False, self._options.dtype)
        self._biases = read_biases(checkpoint, self._shape, self._options)

    def _stacked(self, weights: list[CodedLinearWeight], checkpoint: Checkpoint) -> Coded:
        def weight_of(number: int) -> Coded:
            weight = weights[number].read(checkpoint)
            if isinstance(weight, GroupedWeight) and weight.order is not None:
                raise CheckpointError(
                    f"{self._shape.name}: experts whose columns are reordered (desc_act, actorder) are served on a CPU "
                    "only: use a checkpoint without it, or --device cpu.",
                    param="quantization",
                )
            return weight

        return stack_weights(len(weights), weight_of)


def _weights_of(linear: MakeWeight[W], shape: ExpertsShape, options: TensorOptions) -> tuple[list[W], list[W]]:
    """Make the weights of all experts' gates and ups, and of their downs."""
    products = [shape.products(number) for number in shape.numbers]
    return [linear(each, options) for each, _ in products], [linear(each, options) for _, each in products]


def _specs_of(gate_up: Sequence[LinearWeight], down: Sequence[LinearWeight]) -> Iterator[WeightSpec]:
    for weights in zip(gate_up, down, strict=True):
        for weight in weights:
            yield from weight.weight_specs()
