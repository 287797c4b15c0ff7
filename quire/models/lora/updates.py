"""The low-rank updates of a model's products: which modules they have, and where adapters' weights lie on the device.

An adapter takes one piece of memory, laid out alike on the host and in every slot of the device, so that it is sent in
one copy. Modules that it leaves alone have rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.compute.collectives.collectives import Norms
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.experts import ExpertAdapters, StackedLowRank
from quire.compute.kernels.reference.lora import LowRankWeights, RowUpdate, Scaling, Tiles
from quire.compute.kernels.reference.quantized_rows import QuantizedRows
from quire.models.lora.step_tiles import StepTiles
from quire.models.lora.targets import Target, targets_of
from quire.models.quantization.scheme import ExpertsShape, LinearPart, LinearShape
from quire.models.weights.shards import Cut

_RANKS = 16
"""The ranks of a group: the fewest that a tensor core multiplies. Adapters begin at multiples of so many elements."""
_RENAMED = ".mlp.", ".block_sparse_moe."
"""What Mixtral's layers of experts are called in transformers since version 5, and in checkpoints."""


class ProductViews(NamedTuple):
    """Where the weights of one product lie in the memory of adapters: the matrices A and B, as in LowRankWeights, and
    what outputs are scaled by, as in Scaling."""

    a: Tensor
    b: Tensor
    factors: Tensor
    summands: Tensor


class LowRankUpdate:
    """The low-rank update B A x of one product, whose weights are there once there is memory for them. `step` knows
    which tokens of a step have adapters; `device` is the type of the device that computes."""

    def __init__(self, shape: LinearShape, step: StepTiles, device: str) -> None:
        self.shape = shape
        self.weights: LowRankWeights
        self._step = step
        self._shrink = kernel("lora_shrink", device)
        self._expand = kernel("lora_expand", device)
        self._expand_silu_and_mul = kernel("lora_expand_silu_and_mul", device)
        self._rms_norm = kernel("lora_rms_norm", device)

    @property
    def active(self) -> bool:
        """Whether the step has a token with an adapter."""
        return self._step.tiles is not None

    @property
    def tiles(self) -> Tiles:
        """The step's tiles; only where the update is active."""
        assert self._step.tiles is not None
        return self._step.tiles

    def add(self, x: Tensor, y: Tensor, tiles: Tiles) -> None:
        """Add B A x to y [n, outputs], in place, for rows x [n, columns] that are in `tiles`, not in the step's."""
        self._expand(self._shrink(x, self.weights, tiles), self.weights, tiles, y)

    def shrink(self, x: Tensor) -> Tensor:
        """A x for the tokens with adapters, x [tokens, columns]. Called before the product is computed."""
        low: Tensor = self._shrink(x, self.weights, self.tiles)
        return low

    def expand(self, low: Tensor, y: Tensor) -> None:
        """Add B A x to the product y [tokens, outputs], in place."""
        self._expand(low, self.weights, self.tiles, y)

    def row_update(self, low: Tensor) -> RowUpdate:
        """The update that is to be added to the product's rows."""
        return RowUpdate(low, self.weights, self.tiles)

    def rms_norm(self, low: Tensor, x: Tensor, weight: Tensor, eps: float, out: Tensor, delta: Tensor) -> None:
        """Add B A x to delta, add delta to x, and write the RMS norm of the sum to out.

        `low` is A x, as `shrink` returned it; delta [tokens, outputs] is the product, and undefined afterwards. Other
        arguments are as in reference/norm.py.
        """
        self._rms_norm(low, self.weights, self.tiles, x, weight, eps, out, delta)

    def expand_silu_and_mul(self, low: Tensor, y: Tensor) -> Tensor:
        """Add B A x to y, and return silu of its first half times the second: [tokens, outputs / 2].

        The contents of y [tokens, outputs] are undefined afterwards.
        """
        out = y.new_empty((y.shape[0], y.shape[1] // 2))
        self._expand_silu_and_mul(low, self.weights, self.tiles, y, out)
        return out


class PendingUpdate:
    """A product's outputs y [tokens, outputs], contiguous, to which the one reader of them adds B A x.

    `low` is A x, as `shrink` returned it.
    """

    def __init__(self, update: LowRankUpdate, low: Tensor, y: Tensor) -> None:
        self._update = update
        self._low = low
        self._y = y
        self._is_added = False

    def parts(self) -> tuple[Tensor, RowUpdate]:
        """Return the product's outputs, and the update that is to be added to them."""
        return self._y, self._update.row_update(self._low)

    def total(self) -> Tensor:
        """Return the product's outputs [tokens, outputs], with B A x added."""
        if not self._is_added:
            self._update.expand(self._low, self._y)
            self._is_added = True
        return self._y

    def for_norms(self, norms: Norms) -> tuple[Norms, Tensor]:
        """Return norms that add the update and the outputs to the stream, and the outputs that they are given.

        A norm that returns quantized rows is given the total instead.
        """
        if self._is_added:
            return norms, self._y

        def rms_norm_quantized(
            x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, delta: Tensor
        ) -> QuantizedRows:
            return norms.rms_norm_quantized(x, weight, eps, dtype, self.total())

        return Norms(partial(self._update.rms_norm, self._low), rms_norm_quantized), self._y


class ExpertUpdate(NamedTuple):
    """The low-rank updates of one expert's products."""

    gate_up: LowRankUpdate
    down: LowRankUpdate


class ExpertUpdates:
    """The low-rank updates of one layer's experts, one by one (`each`) and all together."""

    def __init__(self, each: Sequence[ExpertUpdate], step: StepTiles) -> None:
        self.each = each
        self._step = step
        self._gate_up: StackedLowRank
        self._down: StackedLowRank

    @property
    def of_step(self) -> ExpertAdapters | None:
        """The step's updates for products of all experts together; None: no token's adapter changes experts."""
        slots = self._step.expert_slots
        return None if slots is None else ExpertAdapters(slots, self._gate_up, self._down)

    def stack(self) -> None:
        """Stack the weights of all experts. Called once there is memory for them."""
        self._gate_up = _stacked([each.gate_up.weights for each in self.each])
        self._down = _stacked([each.down.weights for each in self.each])


class LowRankUpdates:
    """The low-rank updates of all products of a model.

    Args:
        slots: How many adapters the device holds at once.
        limit: The largest rank of an adapter.
        device: The type of the device that computes.

    Attributes:
        step: Which tokens of the present step have adapters.
        targets: What adapters change, by module, including modules that only other ranks have.
        experts: The shapes of all experts of a layer, undivided, by the module that has them.
        changes_experts: [slots + 1] bool, whether the adapter of a slot changes experts; slot 0 means no adapter.
        rank: The ranks that a slot has room for: `limit`, rounded up to whole groups, since kernels work on these.
    """

    def __init__(self, slots: int, limit: int, device: str) -> None:
        self.slots = slots
        self.limit = limit
        self.rank = -(-limit // _RANKS) * _RANKS
        self.step = StepTiles()
        self.targets: dict[str, Target] = {}
        self.experts: dict[str, ExpertsShape] = {}
        self.changes_experts = np.zeros(slots + 1, dtype=np.bool_)
        self._of_experts: list[int] = []  # products
        self._layers_of_experts: list[ExpertUpdates] = []
        self.device = device
        self._updates: list[LowRankUpdate] = []

    def update_of(self, shape: LinearShape, part: LinearPart | None = None) -> LowRankUpdate:
        """Add a product whose weight has this shape on this rank, and return its update."""
        self.targets.update(targets_of(len(self._updates), shape, part))
        update = LowRankUpdate(shape, self.step, self.device)
        self._updates.append(update)
        return update

    def updates_of_experts(
        self, shape: ExpertsShape, whole: ExpertsShape | None = None, cut: Cut | None = None
    ) -> ExpertUpdates:
        """Add the products of one layer's experts, and return their updates; arguments as of layers.mlp.Experts."""
        whole = whole or shape
        self.experts[whole.name] = whole
        updates, first = [], len(self._updates)
        for number in shape.numbers:
            own_parts = zip(shape.products(number), whole.products(number), strict=True)
            gate_up, down = (
                self.update_of(own, LinearPart(each, {} if cut is None else dict.fromkeys(each.names, cut)))
                for own, each in own_parts
            )
            updates.append(ExpertUpdate(gate_up, down))
        self._of_experts += range(first, len(self._updates))
        self._layers_of_experts.append(ExpertUpdates(updates, self.step))
        return self._layers_of_experts[-1]

    def note_others(self, whole: LowRankUpdates) -> None:
        """Add the modules of the undivided model that only other ranks have."""
        others = {name: replace(target, part=None) for name, target in whole.targets.items()}
        self.targets = others | self.targets
        self.experts = whole.experts | self.experts

    def own_name(self, module: str) -> str:
        """What the model calls a module that adapters may call by transformers' present name."""
        theirs, ours = _RENAMED
        renamed = module.replace(theirs, ours)
        known = renamed in self.targets or renamed.removesuffix(".base_layer") in self.experts
        return renamed if known else module

    def takes_magnitudes(self, module: str) -> bool:
        """Whether adapters may scale a module's outputs: not those of all experts, which have no norms of their own,
        and of one expert on a CPU alone."""
        of_all = module in self.experts or module.removesuffix(".base_layer") in self.experts
        of_one = any(module.startswith(f"{name}.") for name in self.experts)
        return not of_all and (self.device == "cpu" or not of_one)

    @property
    def has_experts(self) -> bool:
        """Whether adapters may change experts of this rank."""
        return bool(self._of_experts)

    def note_experts(self, slot: int, adapter: HostAdapter) -> None:
        """Record whether the adapter that was put into a slot changes experts."""
        self.changes_experts[slot] = bool(adapter.ranks[0, self._of_experts].any())

    @property
    def size(self) -> int:
        """How many elements an adapter takes."""
        return self._scaling_at + -(-2 * self._outputs // _RANKS) * _RANKS

    @property
    def number(self) -> int:
        return len(self._updates)

    def views(self, memory: Tensor) -> Iterator[ProductViews]:
        """Yield where each product's weights lie in the memory of adapters [adapters, size].

        Scaling comes after all A and B, so that these are aligned.
        """
        at, scaling_at, outputs = 0, self._scaling_at, self._outputs
        for each in self._updates:
            shape, rank = each.shape, self.rank
            a_rows = len(shape.names) * rank
            a = memory[:, at : at + a_rows * shape.columns].view(-1, a_rows, shape.columns)
            at += a_rows * shape.columns
            b = memory[:, at : at + shape.outputs * rank]
            if self.device == "cpu":
                b = b.view(-1, rank, shape.outputs).transpose(1, 2)  # outputs side by side: [slots, outputs, rank]
            else:
                b = b.view(-1, shape.outputs, rank)
            at += shape.outputs * rank
            factors = memory[:, scaling_at : scaling_at + shape.outputs]
            summands = memory[:, scaling_at + outputs : scaling_at + outputs + shape.outputs]
            scaling_at += shape.outputs
            yield ProductViews(a, b, factors, summands)

    def bind(self, memory: Tensor, ranks: Tensor) -> None:
        """Use memory [slots, size] of the model's dtype for adapters from now on. `ranks` [slots, 2, products] int64
        has each adapter's as in HostAdapter."""
        for number, (each, views) in enumerate(zip(self._updates, self.views(memory), strict=True)):
            scaling = Scaling(views.factors, views.summands, ranks[:, 1, number])
            each.weights = LowRankWeights(views.a, views.b, ranks[:, 0, number], each.shape.rows, scaling)
        for layer in self._layers_of_experts:
            layer.stack()

    @property
    def _outputs(self) -> int:
        return sum(each.shape.outputs for each in self._updates)

    @property
    def _scaling_at(self) -> int:
        """Where scaling begins in an adapter: after the elements of all A and B."""
        return sum(
            self.rank * (len(each.shape.names) * each.shape.columns + each.shape.outputs) for each in self._updates
        )


def _stacked(each: Sequence[LowRankWeights]) -> StackedLowRank:
    """Return the weights of one product of all experts as single tensors; they lie equally far apart in memory."""

    def stack(tensors: Sequence[Tensor]) -> Tensor:
        first, at = tensors[0], [tensor.storage_offset() for tensor in tensors]
        apart = at[1] - at[0] if len(at) > 1 else 0
        assert at == [at[0] + number * apart for number in range(len(at))]
        shape = (len(first), len(tensors), *first.shape[1:])
        return first.as_strided(shape, (first.stride(0), apart, *first.stride()[1:]))

    return StackedLowRank(*(stack([getattr(one, field) for one in each]) for field in StackedLowRank._fields))


@dataclass(frozen=True)
class HostAdapter:
    """An adapter's weights on the host; if ranks divide the model, this rank's part of them.

    Attributes:
        weights: [size], laid out as in a slot of the device.
        ranks: [2, products] int64: how many ranks each product has in use, and 1 where its outputs are scaled.
        digest: A digest of everything that decides what the adapter computes.
    """

    weights: Tensor
    ranks: Tensor
    digest: str


class AdapterMemory:
    """The slots of the device, where the weights of these updates lie; the first one is number 1."""

    def __init__(self, updates: LowRankUpdates, dtype: torch.dtype, device: torch.device) -> None:
        self._updates = updates
        self._weights = torch.zeros((updates.slots, updates.size), dtype=dtype, device=device)
        self._ranks = torch.zeros((updates.slots, 2, updates.number), dtype=torch.int64, device=device)
        self._staged: tuple[Tensor, Tensor] | None = None
        self._stream: torch.cuda.Stream | None = None
        updates.bind(self._weights, self._ranks)

    def write(self, slot: int, adapter: HostAdapter) -> None:
        """Copy an adapter to a slot that no step in flight reads, and wait until it is there. Called in one thread."""
        self._updates.note_experts(slot, adapter)
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
