"""Experts of any scheme, one after the other: each is three weights of a linear layer.

How many tokens an expert has is known only to the device, so this serves processors alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from quire.compute.kernels.reference.experts import experts
from quire.models.quantization.scheme import ExpertsShape, LinearShape, LinearWeight
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions


class LinearScheme(Protocol):
    """The part of a WeightScheme that experts are made of."""

    def linear(self, shape: LinearShape, options: TensorOptions) -> LinearWeight:
        """Make the weight of a matrix product; it is not loaded yet."""
        ...


class ExpertLoop:
    """ExpertWeights that compute one expert after the other, each by its linear weights."""

    def __init__(self, scheme: LinearScheme, shape: ExpertsShape, options: TensorOptions) -> None:
        numbers, names = shape.numbers, shape.names

        def weight(expert: int, projections: tuple[str, ...], rows: int, columns: int) -> LinearWeight:
            modules = tuple(f"{shape.name}.{expert}.{projection}" for projection in projections)
            return scheme.linear(LinearShape(modules, (rows,) * len(modules), columns), options)

        self._gate_up = [weight(number, (names.gate, names.up), shape.width, shape.hidden) for number in numbers]
        self._down = [weight(number, (names.down,), shape.hidden, shape.width) for number in numbers]

    def weight_specs(self) -> Iterator[WeightSpec]:
        for gate_up, down in zip(self._gate_up, self._down, strict=True):
            yield from gate_up.weight_specs()
            yield from down.weight_specs()

    def load(self, checkpoint: Checkpoint) -> None:
        for weight in (*self._gate_up, *self._down):
            weight.load(checkpoint)

    def multiply(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        experts(x, self._gate_up, self._down, numbers, weights, out, linear=_multiply)
        return out

    def gate_up(self, number: int, x: Tensor) -> Tensor:
        return self._gate_up[number].multiply(x, None)

    def down(self, number: int, x: Tensor) -> Tensor:
        return self._down[number].multiply(x, None)


def _multiply(x: Tensor, weight: LinearWeight, bias: None) -> Tensor:
    return weight.multiply(x, bias)
