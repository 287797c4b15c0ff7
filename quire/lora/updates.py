"""The low-rank updates of a model's products: which modules they have, and where adapters' weights lie on the device.

An adapter takes one piece of memory, laid out alike on the host and in every slot of the device, so that it is sent in
one copy. Modules that it leaves alone have rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.dispatch import kernel
from quire.kernels.reference.lora import LowRankWeights
from quire.lora.step_tiles import StepTiles
from quire.quantization.scheme import LinearShape

_RANKS = 16
"""Of a group: as many as a tensor core multiplies at least."""


@dataclass(frozen=True)
class Target:
    """A module that adapters may change.

    Attributes:
        update: The number of the product that has it.
        module: Its number among that product's modules.
        begin: Where its outputs begin among the product's.
        rows, columns: Its outputs and inputs.
    """

    update: int
    module: int
    begin: int
    rows: int
    columns: int


class LowRankUpdate:
    """Of one product.

    Args:
        shape: The product's.
        step: What of a step is changed.
        device: The type of the device that computes.

    Attributes:
        weights: Of all adapters on the device, once there is memory for them.
    """

    def __init__(self, shape: LinearShape, step: StepTiles, device: str) -> None:
        self.shape = shape
        self.weights: LowRankWeights
        self._step = step
        self._shrink = kernel("lora_shrink", device)
        self._expand = kernel("lora_expand", device)

    @property
    def active(self) -> bool:
        """Whether the step has a token with an adapter."""
        return self._step.tiles is not None

    def shrink(self, x: Tensor) -> Tensor:
        """A x of tokens with adapters, x [tokens, columns]: comes before the product."""
        assert self._step.tiles is not None
        low: Tensor = self._shrink(x, self.weights, self._step.tiles)
        return low

    def expand(self, low: Tensor, y: Tensor) -> None:
        """Add B A x to the product's rows, y [tokens, outputs]."""
        assert self._step.tiles is not None
        self._expand(low, self.weights, self._step.tiles, y)


class LowRankUpdates:
    """Of all products of a model.

    Args:
        slots: Adapters that the device holds at once.
        limit: The largest rank of an adapter.
        device: The type of the device that computes.

    Attributes:
        step: What of the present step is changed.
        targets: By module.
        slots, limit: As given.
        rank: Of a place: kernels work on whole groups of ranks.
    """

    def __init__(self, slots: int, limit: int, device: str) -> None:
        self.slots = slots
        self.limit = limit
        self.rank = -(-limit // _RANKS) * _RANKS
        self.step = StepTiles()
        self.targets: dict[str, Target] = {}
        self._device = device
        self._updates: list[LowRankUpdate] = []

    def update_of(self, shape: LinearShape) -> LowRankUpdate:
        """The update of another product."""
        begin = 0
        for module, (name, rows) in enumerate(zip(shape.names, shape.rows, strict=True)):
            self.targets[name] = Target(len(self._updates), module, begin, rows, shape.columns)
            begin += rows
        update = LowRankUpdate(shape, self.step, self._device)
        self._updates.append(update)
        return update

    @property
    def size(self) -> int:
        """Elements of an adapter."""
        return sum(
            self.rank * (len(each.shape.names) * each.shape.columns + each.shape.outputs) for each in self._updates
        )

    @property
    def number(self) -> int:
        """How many products there are."""
        return len(self._updates)

    def views(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A and B of each product in the memory of adapters [adapters, size]; see LowRankWeights."""
        at = 0
        for each in self._updates:
            shape, rank = each.shape, self.rank
            a_rows = len(shape.names) * rank
            a = memory[:, at : at + a_rows * shape.columns].view(-1, a_rows, shape.columns)
            at += a_rows * shape.columns
            b = memory[:, at : at + shape.outputs * rank]
            if self._device == "cpu":
                b = b.view(-1, rank, shape.outputs).transpose(1, 2)  # outputs side by side: [slots, outputs, rank]
            else:
                b = b.view(-1, shape.outputs, rank)
            at += shape.outputs * rank
            yield a, b

    def bind(self, memory: Tensor, ranks: Tensor) -> None:
        """Adapters lie in `memory` [slots, size] from now on; `ranks` [slots, products] int64."""
        for number, (each, (a, b)) in enumerate(zip(self._updates, self.views(memory), strict=True)):
            each.weights = LowRankWeights(a, b, ranks[:, number], each.shape.rows)


@dataclass(frozen=True)
class HostAdapter:
    """An adapter's weights on the host.

    Attributes:
        weights: [size], laid out as in a slot of the device.
        ranks: [products] int64.
        digest: Of all that decides what it computes.
    """

    weights: Tensor
    ranks: Tensor
    digest: str


class AdapterMemory:
    """The slots of the device; the first one is number 1.

    Args:
        updates: Whose weights lie there.
        dtype, device: Of these.
    """

    def __init__(self, updates: LowRankUpdates, dtype: torch.dtype, device: torch.device) -> None:
        self._weights = torch.zeros((updates.slots, updates.size), dtype=dtype, device=device)
        self._ranks = torch.zeros((updates.slots, updates.number), dtype=torch.int64, device=device)
        self._staged: tuple[Tensor, Tensor] | None = None
        self._stream: torch.cuda.Stream | None = None
        updates.bind(self._weights, self._ranks)

    def write(self, slot: int, adapter: HostAdapter) -> None:
        """Bring an adapter to a slot that no step in flight reads; returns when it is there. Called in one thread."""
        if self._weights.device.type == "cpu":
            self._weights[slot - 1].copy_(adapter.weights)
            self._ranks[slot - 1].copy_(adapter.ranks)
            return
        if self._stream is None or self._staged is None:
            self._stream = torch.cuda.Stream(self._weights.device)  # type: ignore[no-untyped-call]
            self._staged = adapter.weights.pin_memory(), adapter.ranks.pin_memory()
        weights, ranks = self._staged
        weights.copy_(adapter.weights)
        ranks.copy_(adapter.ranks)
        with torch.cuda.stream(self._stream):
            self._weights[slot - 1].copy_(weights, non_blocking=True)
            self._ranks[slot - 1].copy_(ranks, non_blocking=True)
        self._stream.synchronize()
