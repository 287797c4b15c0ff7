"""The products of all experts of a layer by one op, for weights of any form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.experts import ExpertAdapters, ExpertBiases
from quire.models.quantization.scheme import ExpertsShape
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions


class KernelExperts:
    """The products of ExpertWeights and AdaptableExperts: the op `op`, of all gates and ups, and of all downs."""

    def __init__(self, op: str, shape: ExpertsShape, options: TensorOptions) -> None:
        self._shape = shape
        self._options = options
        self._experts = kernel(op, options.device.type)
        self._stacks: tuple[Any, Any]
        self._biases: ExpertBiases | None = None

    def multiply(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._experts(x, *self._stacks, numbers, weights, out, self._shape.others, **self._terms)
        return out

    def multiply_adapted(self, x: Tensor, numbers: Tensor, weights: Tensor, adapters: ExpertAdapters) -> Tensor:
        out = torch.empty_like(x)
        self._experts(x, *self._stacks, numbers, weights, out, self._shape.others, adapters, **self._terms)
        return out

    @property
    def _terms(self) -> dict[str, Any]:
        return {"activation": self._shape.activation, "biases": self._biases}


def bias_specs(shape: ExpertsShape) -> Iterator[WeightSpec]:
    """Yield the specs of the biases of all experts, if they have any."""
    for number in shape.numbers if shape.biases else ():
        for projection, rows in zip(shape.names, (*[shape.width] * len(shape.names.first), shape.hidden), strict=True):
            yield WeightSpec(f"{shape.name}.{number}.{projection}.bias", (rows,))


def read_biases(checkpoint: Checkpoint, shape: ExpertsShape, options: TensorOptions) -> ExpertBiases | None:
    """Read the biases of this rank's experts; None: they have none."""
    if not shape.biases:
        return None
    first = len(shape.names.first)
    of_gate_up = torch.empty((shape.count, first * shape.width), dtype=options.dtype, device=options.device)
    of_down = of_gate_up.new_empty((shape.count, shape.hidden))
    for number, gate_up, down in zip(shape.numbers, of_gate_up, of_down, strict=True):
        for projection, part in zip(shape.names, (*gate_up.chunk(first), down), strict=True):
            checkpoint.read(f"{shape.name}.{number}.{projection}.bias", part)
    return ExpertBiases(of_gate_up, of_down if shape.adds_bias else None)


def with_bias(y: Tensor, biases: Tensor | None, number: int) -> Tensor:
    """Return y [tokens, outputs] plus one expert's bias of all experts' [experts, outputs]; None: there are none."""
    return y if biases is None else y + biases[number]
