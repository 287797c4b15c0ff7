"""Products to which adapters add low-rank updates: of linear layers and of experts, in any weight scheme."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.compute.collectives.delta import total_of
from quire.compute.kernels.activations import SILU, Activation
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.activation import activated
from quire.compute.kernels.reference.lora import Tiles
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.models.layers.linear import Linear
from quire.models.lora.step_tiles import order_tokens
from quire.models.lora.updates import ExpertUpdates, LowRankUpdate, PendingUpdate
from quire.models.quantization.scheme import AdaptableExperts, RowForm, SeparateExperts


class AdaptedLinear:
    """A Projection that adds B A x to the rows x Wᵀ + b of tokens with adapters.

    Args:
        base: Computes x Wᵀ + b.
        update: Computes B A x.

    Attributes:
        row_form: None: A multiplies dense rows only.
    """

    row_form: RowForm | None = None

    def __init__(self, base: Linear, update: LowRankUpdate) -> None:
        self._base = base
        self._update = update

    def __call__(self, x: Rows) -> Tensor:
        return total_of(self.pending(x))

    def pending(self, x: Rows) -> Tensor | PendingUpdate:
        if not self._update.active:
            return self._base(x)
        assert isinstance(x, Tensor)
        y, low = self._base.multiply_and_shrink(x, self._update)
        return PendingUpdate(self._update, low, y)

    def silu_and_mul(self, x: Rows) -> Tensor:
        if not self._update.active:
            return self._base.silu_and_mul(x)
        assert isinstance(x, Tensor)
        y, low = self._base.multiply_and_shrink(x, self._update)
        return self._update.expand_silu_and_mul(low, y)


class AdaptedExperts:
    """Σ weight · down(silu(gate(x)) · up(x)) over each token's experts, where all three may have low-rank updates.

    Args:
        base: Computes steps without such updates; called like `Experts.__call__`.
        weights: Computes steps with such updates.
        updates: The updates of the layer's experts.
    """

    def __init__(self, base: Callable[..., Tensor], weights: AdaptableExperts, updates: ExpertUpdates) -> None:
        self._base = base
        self._weights = weights
        self._updates = updates

    def __call__(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, hidden], each token's experts and their weights [tokens, chosen] → [tokens, hidden]."""
        adapters = self._updates.of_step
        if adapters is None:
            return self._base(x, numbers, weights)
        return self._weights.multiply_adapted(x, numbers, weights, adapters)


class SeparatelyAdaptedExperts:
    """Σ weight · down(silu(gate(x)) · up(x)) over each token's experts on a CPU, where all three may have updates.

    Experts are computed one by one, for the tokens whose adapters change experts.

    Args:
        base: Computes all tokens whose adapters leave experts alone; called like `Experts.__call__`.
        separate: Each expert's products; numbers from their count on are other ranks' experts, and are left out.
        updates: The updates of the layer's experts.
        activation: What makes one value of a gate and an up.
    """

    def __init__(
        self, base: Callable[..., Tensor], separate: SeparateExperts, updates: ExpertUpdates, activation: Activation
    ) -> None:
        self._base = base
        self._separate = separate
        self._updates = updates
        self._activation = activation
        self._silu_and_mul = kernel("silu_and_mul", "cpu")

    def __call__(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, hidden], each token's experts and their weights [tokens, chosen] → [tokens, hidden]."""
        adapters = self._updates.of_step
        if adapters is None:
            return self._base(x, numbers, weights)
        slots, out = adapters.slots, torch.zeros_like(x)
        alone, changed = (slots == 0).nonzero()[:, 0], slots.nonzero()[:, 0]
        if len(alone):
            out[alone] = self._base(x[alone], numbers[alone], weights[alone])
        experts = numbers[changed]
        for number in sorted(set(experts[experts < len(self._updates.each)].tolist())):
            row, choice = (experts == number).nonzero(as_tuple=True)
            tokens = changed[row]
            y = self._expert(number, x[tokens], slots[tokens])
            out.index_add_(0, tokens, y.mul_(weights[tokens, choice].unsqueeze(1)))
        return out

    def _expert(self, number: int, x: Tensor, slots: Tensor) -> Tensor:
        """Compute one expert's output for its tokens: [tokens, hidden] → [tokens, hidden]."""
        update, tiles = self._updates.each[number], Tiles(*map(torch.from_numpy, order_tokens(slots.numpy())))
        gate_up = self._separate.gate_up(number, x)
        update.gate_up.add(x, gate_up, tiles)
        if self._activation == SILU:
            hidden = gate_up.new_empty((len(x), gate_up.shape[1] // 2))
            self._silu_and_mul(gate_up, hidden)
        else:
            hidden = activated(gate_up, self._activation)
        y = self._separate.down(number, hidden)
        update.down.add(hidden, y, tiles)
        return y
