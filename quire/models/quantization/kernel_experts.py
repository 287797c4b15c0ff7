"""The products of all experts of a layer by one op, for weights of any form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.experts import ExpertAdapters, ExpertBiases
from quire.models.quantization.scheme import ExpertsShape
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
