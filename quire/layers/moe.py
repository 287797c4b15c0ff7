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
        self._gate_up = self._load(checkpoint, (self._names.gate, self._names.up), self._width, self._hidden)
        self._down = self._load(checkpoint, (self._names.down,), self._hidden, self._width)

    def __call__(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, hidden], each token's experts and their weights [tokens, chosen] → [tokens, hidden]."""
        out = torch.empty_like(x)
        self._experts(x, self._gate_up, self._down, numbers, weights, out)
        return out

    def _load(
        self, checkpoint: Checkpoint, projections: tuple[str, ...], rows: int, columns: int
    ) -> Sequence[Tensor] | Tensor:
        """Of all experts, these projections [rows, columns] below each other, packed."""

        def read() -> Sequence[Tensor] | Tensor:
            shape, options = (self._count, len(projections), rows, columns), self._options
            stacked = torch.empty(shape, dtype=options.dtype, device=options.device)
            for number, expert in enumerate(stacked):
                for projection, part in zip(projections, expert, strict=True):
                    checkpoint.read(f"{self._name}.{number}.{projection}.weight", part)
            packed: Sequence[Tensor] | Tensor = self._pack(stacked.flatten(1, 2))
            return packed

        return self._options.packed_weights.get(f"experts {self._name} {projections} {rows} × {columns}", read)


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
