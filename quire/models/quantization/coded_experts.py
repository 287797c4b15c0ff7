"""Experts of any scheme: on a processor one after the other, on a GPU stacked for a product that expands codes itself.

The stack takes as much memory as the codes and scales of all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.coded_experts import Coded, stack_weights
from quire.compute.kernels.reference.expert_adapters import ExpertAdapters
from quire.compute.kernels.reference.grouped_linear import GroupedWeight
from quire.errors import CheckpointError
from quire.models.quantization.expert_loop import ExpertLoop
from quire.models.quantization.scheme import ExpertsShape, ExpertWeights, LinearShape, LinearWeight
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions


class CodedLinearWeight(LinearWeight, Protocol):
    """A LinearWeight of codes."""

    def read(self, checkpoint: Checkpoint) -> Coded:
        """Read the weight in the form of the reference kernels."""
        ...


class CodedScheme(Protocol):
    """A WeightScheme whose linear weights are codes."""

    def linear(self, shape: LinearShape, options: TensorOptions) -> CodedLinearWeight:
        """Make the weight of a matrix product; it is not loaded yet."""
        ...


def experts_of(scheme: CodedScheme, shape: ExpertsShape, options: TensorOptions) -> ExpertWeights:
    """Make the weights of experts in this scheme; they are not loaded yet."""
    loops = options.device.type == "cpu"
    return ExpertLoop(scheme, shape, options) if loops else StackedExperts(scheme, shape, options)


class StackedCodes:
    """ExpertWeights and AdaptableExperts of two stacks of codes: one of gates and ups, one of downs.

    Args:
        shape: The experts' sizes and names.
        options: The device.
    """

    _stacks: tuple[Coded, Coded]

    def __init__(self, shape: ExpertsShape, options: TensorOptions) -> None:
        self._shape = shape
        self._options = options
        self._experts = kernel("coded_experts", options.device.type)

    def multiply(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._experts(x, *self._stacks, numbers, weights, out, self._shape.others)
        return out

    def multiply_adapted(self, x: Tensor, numbers: Tensor, weights: Tensor, adapters: ExpertAdapters) -> Tensor:
        out = torch.empty_like(x)
        self._adapted_experts(x, *self._stacks, numbers, weights, out, self._shape.others, adapters)
        return out

    @cached_property
    def _adapted_experts(self) -> Callable[..., None]:
        return kernel("adapted_coded_experts", self._options.device.type)


class StackedExperts(StackedCodes):
    """ExpertWeights of any coded scheme, stacked into one product for a GPU."""

    def __init__(self, scheme: CodedScheme, shape: ExpertsShape, options: TensorOptions) -> None:
        super().__init__(shape, options)
        names = shape.names
        self._gate_up = [
            self._weight(scheme, options, number, (names.gate, names.up), shape.width, shape.hidden)
            for number in shape.numbers
        ]
        self._down = [
            self._weight(scheme, options, number, (names.down,), shape.hidden, shape.width) for number in shape.numbers
        ]

    def weight_specs(self) -> Iterator[WeightSpec]:
        for gate_up, down in zip(self._gate_up, self._down, strict=True):
            yield from gate_up.weight_specs()
            yield from down.weight_specs()

    def load(self, checkpoint: Checkpoint) -> None:
        """Read all experts and stack them. Called once, in any thread.

        Raises:
            CheckpointError: Columns are reordered, differently for each expert.
        """
        self._stacks = self._stacked(self._gate_up, checkpoint), self._stacked(self._down, checkpoint)

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

    def _weight(
        self,
        scheme: CodedScheme,
        options: TensorOptions,
        number: int,
        projections: tuple[str, ...],
        rows: int,
        columns: int,
    ) -> CodedLinearWeight:
        modules = tuple(f"{self._shape.name}.{number}.{projection}" for projection in projections)
        return scheme.linear(LinearShape(modules, (rows,) * len(modules), columns), options)
