"""Mixture of experts: which experts a token goes to, and their gated MLPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.reference.embedding import local_indices
from quire.compute.kernels.reference.expert_adapters import (
    AdaptedPairs,
    ExpertAdapters,
    StackedLowRank,
    lora_of_pairs,
)


def route(
    logits: Tensor, chosen: int, renormalise: bool, first: int = 0, count: int | None = None
) -> tuple[Tensor, Tensor]:
    """The likeliest experts of each token, by a softmax in fp32 (Shazeer et al. 2017; Mixtral, eq. 1, renormalises).

    Args:
        logits: [tokens, experts].
        chosen: How many.
        renormalise: Scale their weights to the sum 1.
        first, count: The experts that are here: `first` to `first + count - 1`; None: all are.

    Returns:
        [tokens, chosen] weights in the logits' dtype, and as many expert numbers, integers, from 0 on among those that
        are here; `count` for others.
    """
    weights, numbers = logits.float().softmax(-1).topk(chosen)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    if count is not None:
        local_indices(numbers, first, count, numbers)
    return weights.to(logits.dtype), numbers


def pack_experts(weights: Tensor) -> Sequence[Tensor]:
    """The weights [experts, rows, columns] as `experts` wants them: one by one."""
    return weights.unbind()


def expert_linear(x: Tensor, weights: Sequence[Any], number: int) -> Tensor:
    """x Wᵀ with one expert's weight: [tokens, columns] → [tokens, rows]; `weights` as from `pack_experts`."""
    return F.linear(x, weights[number])


def experts(
    x: Tensor,
    gate_up: Sequence[Any],
    down: Sequence[Any],
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    others: int = 0,
    linear: Callable[[Tensor, Any, None], Tensor] = F.linear,
    adapters: ExpertAdapters | None = None,
) -> None:
    """out = Σ weight · down(silu(gate(x)) · up(x)) over each token's experts.

    Args:
        x: [tokens, hidden].
        gate_up: By expert, [2 · width, hidden]: gate, then up.
        down: By expert, [hidden, width].
        numbers, weights: [tokens, chosen]; see `route`. What is not here adds nothing.
        out: [tokens, hidden].
        others: How many experts are not here.
        linear: The product with one of the weights; see the op of this name.
        adapters: See adapted_experts.
    """
    out.zero_()
    order = numbers.flatten().argsort(stable=True)  # (token, choice) pairs, expert by expert
    ends = torch.bincount(numbers.flatten(), minlength=len(gate_up)).cumsum(0).tolist()[: len(gate_up)]
    tokens, shares = order // numbers.shape[1], weights.flatten().index_select(0, order).unsqueeze(1)
    first = 0
    for expert, end in enumerate(ends):
        if end > first:
            own = tokens[first:end]
            rows = x.index_select(0, own)
            both = linear(rows, gate_up[expert], None)
            if adapters is not None:
                both += _of_adapters(rows, adapters.gate_up, expert, adapters.slots[own])
            del rows
            gate, up = both.chunk(2, dim=-1)
            middle = F.silu(gate).mul_(up)
            del both, gate, up
            y = linear(middle, down[expert], None)
            if adapters is not None:
                y += _of_adapters(middle, adapters.down, expert, adapters.slots[own])
            out.index_add_(0, own, y.mul_(shares[first:end]))
            del middle, y  # or they stand beside the next expert's
        first = end


def adapted_experts(
    x: Tensor,
    gate_up: Sequence[Any],
    down: Sequence[Any],
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    others: int,
    adapters: ExpertAdapters,
) -> None:
    """As the op `experts`; adapters of tokens add to all three products."""
    experts(x, gate_up, down, numbers, weights, out, others, adapters=adapters)


def _of_adapters(x: Tensor, weights: StackedLowRank, expert: int, slots: Tensor) -> Tensor:
    """What is added to one expert's product, for rows with these adapters."""
    return lora_of_pairs(x, weights, AdaptedPairs(torch.full_like(slots, expert), slots), 1)
