"""A mixture of experts in place of an MLP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.dispatch import kernel
from quire.layers.layer import TensorOptions
from quire.layers.linear import Linear
from quire.weights.checkpoint import Checkpoint, WeightSpec


@dataclass(frozen=True)
class ExpertNames:
    """What a checkpoint calls an expert's projections: `{layer}.experts.{number}.{gate}.weight`."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class Routing:
    """How tokens go to experts: `count` there are, `chosen` serve a token; see the kernel `route`."""

    count: int
    chosen: int
    renormalise: bool


class Experts:
    """The stacked gated MLPs of one layer's experts.

    Args:
        name: Of the checkpoint's module that has them, by number.
        names: Of each one's projections.
        count: How many.
        hidden, width: Of the stream and of one expert.
        options: The device and dtype of the weights.
    """

    def __init__(
        self, name: str, names: ExpertNames, count: int, hidden: int, width: int, options: TensorOptions
    ) -> None:
        self._name = name
        self._names = names
        self._count = count
        self._hidden = hidden
        self._width = width
        self._options = options
        self._experts = kernel("experts", options.device.type)
        self._pack = kernel("pack_experts", options.device.type)
        self._gate_up: Sequence[Tensor] | Tensor
        self._down: Sequence[Tensor] | Tensor

    def weight_specs(self) -> Iterator[WeightSpec]:
        for number in range(self._count):
            for projection in (self._names.gate, self._names.up):
                yield WeightSpec(f"{self._name}.{number}.{projection}.weight", (self._width, self._hidden))
            yield WeightSpec(f"{self._name}.{number}.{self._names.down}.weight", (self._hidden, self._width))

    def load_weights(self, checkpoint: Checkpoint) -> None:
        gate_up = self._empty(2 * self._width, self._hidden)
        down = self._empty(self._hidden, self._width)
        for number in range(self._count):
            gate, up = gate_up[number].chunk(2)
            for projection, part in (
                (self._names.gate, gate),
                (self._names.up, up),
                (self._names.down, down[number]),
            ):
                checkpoint.read(f"{self._name}.{number}.{projection}.weight", part)
        self._gate_up, self._down = self._pack(gate_up), self._pack(down)

    def __call__(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, hidden], each token's experts and their weights [tokens, chosen] → [tokens, hidden]."""
        out = torch.empty_like(x)
        self._experts(x, self._gate_up, self._down, numbers, weights, out)
        return out

    def _empty(self, rows: int, columns: int) -> Tensor:
        return torch.empty((self._count, rows, columns), dtype=self._options.dtype, device=self._options.device)


class MixtureOfExperts:
    """Each token goes to a few experts; their outputs are summed by the router's weights."""

    def __init__(self, router: Linear, experts: Experts, routing: Routing, options: TensorOptions) -> None:
        self._router = router
        self._experts = experts
        self._routing = routing
        self._route = kernel("route", options.device.type)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] → [tokens, hidden]."""
        weights, numbers = self._route(self._router(x), self._routing.chosen, self._routing.renormalise)
        return self._experts(x, numbers, weights)
