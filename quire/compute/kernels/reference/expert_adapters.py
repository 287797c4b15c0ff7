"""Low-rank updates of the products of experts: each token's choice of an expert has a row of its own, and its adapter
has A and B of every expert.

What is added to a product does not depend on it, so it is computed first, and the product's kernel adds it before it
applies a gate or a router's weight. Rows of tokens without an adapter are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StackedLowRank(NamedTuple):
    """Of one product of all experts, for all adapters on the device.

    Attributes:
        a: [slots, experts, modules · rank, columns], of the model's dtype; of gate and up, which are two modules, gate
            comes first. Only the first two dimensions have gaps. Ranks that are not in use are 0.
        b: [slots, experts, outputs, rank], times the adapter's scale; the same. Modules have equally many outputs.
        ranks: [slots, experts] int64, how many of a module's ranks are in use; 0: the adapter leaves this expert's
            product alone.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor

    @property
    def modules(self) -> int:
        return self.a.shape[2] // self.b.shape[3]


class ExpertAdapters(NamedTuple):
    """What adapters change of a layer's experts in a step.

    Attributes:
        slots: [tokens] int64, where each one's adapter is, from 1, if it changes experts; else 0.
        gate_up, down: Of all adapters on the device.
    """

    slots: Tensor
    gate_up: StackedLowRank
    down: StackedLowRank


class AdaptedPairs(NamedTuple):
    """Pairs of a token and one of its experts, of which some have an adapter.

    Attributes:
        numbers: [pairs], each one's expert; a number from their count on: it is elsewhere.
        slots: [pairs], its adapter, from 1; 0: it has none.
    """

    numbers: Tensor
    slots: Tensor


def group_adapted_pairs(numbers: Tensor, slots: Tensor, weights: StackedLowRank) -> AdaptedPairs:
    """What `lora_of_pairs` is to know of a layer's tokens.

    Args:
        numbers: [tokens, chosen], each token's experts here, and the count of these for others.
        slots: See ExpertAdapters.
        weights: Of any of the layer's products.

    Returns:
        The pairs, token by token, in a form of the implementation's own.
    """
    return AdaptedPairs(numbers.flatten(), slots.repeat_interleave(numbers.shape[1]))


def lora_of_pairs(x: Tensor, weights: StackedLowRank, pairs: AdaptedPairs, sharing: int) -> Tensor:
    """B A x of pairs whose token has an adapter and whose expert is here.

    Args:
        x: [pairs / sharing, columns]: so many pairs have one row.
        weights, pairs: See there.
        sharing: See x.

    Returns:
        [pairs, outputs] in x's dtype. A x is rounded to it, too, as PEFT does. Other rows may have anything; here they
        are 0.
    """
    count, most = weights.ranks.shape[1], weights.b.shape[3]
    out = x.new_zeros((len(pairs.numbers), weights.b.shape[2]))
    of_pair = torch.stack((pairs.slots.long(), pairs.numbers.long()), 1)
    for slot, number in sorted({(slot, number) for slot, number in of_pair.tolist() if slot and number < count}):
        own = ((pairs.slots == slot) & (pairs.numbers == number)).nonzero()[:, 0]
        rank = int(weights.ranks[slot - 1, number])
        a = weights.a[slot - 1, number].view(weights.modules, most, -1)
        b = weights.b[slot - 1, number].view(weights.modules, -1, most)
        for module, part in enumerate(out.view(len(out), weights.modules, -1).unbind(1)):
            part[own] = (x[own // sharing] @ a[module, :rank].T) @ b[module, :, :rank].T
    return out
