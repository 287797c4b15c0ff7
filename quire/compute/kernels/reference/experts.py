"""Mixture of experts: which experts a token goes to, their gated MLPs, and low-rank updates of their products.

Each token's choice of an expert has a row of its own, and its adapter has A and B of every expert. What an adapter adds
to a product does not depend on the product, so it is computed first, and the product's kernel adds it before it applies
a gate or a router's weight. Rows of tokens without an adapter are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.activations import SILU, Activation
from quire.compute.kernels.reference.activation import activated
from quire.compute.kernels.reference.embedding import local_indices
from quire.compute.kernels.reference.linear import CodebookWeight, GroupedWeight, ScaledWeight
from quire.compute.kernels.routing import Routing, Scoring

Coded = GroupedWeight | CodebookWeight | ScaledWeight
_SHARED = ("table",)


class StackedLowRank(NamedTuple):
    """The low-rank weights of one product of all experts, for all adapters on the device.

    Attributes:
        a: [slots, experts, modules · rank, columns], of the model's dtype. Gate and up are two modules, gate first.
            Only the first two dimensions have gaps. Ranks that are not in use are 0.
        b: [slots, experts, outputs, rank], times the adapter's scale; only the first two dimensions have gaps. Modules
            have equally many outputs.
        ranks: [slots, experts] int64, how many of a module's ranks are in use; 0: the adapter does not change this
            expert's product.
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
        slots: [tokens] int64, the slot of each token's adapter, from 1; 0: no adapter changes the token's experts.
        gate_up, down: The weights of all adapters on the device.
    """

    slots: Tensor
    gate_up: StackedLowRank
    down: StackedLowRank


class ExpertBiases(NamedTuple):
    """The biases of all experts' products.

    Attributes:
        gate_up: [experts, 2 · width], gate, then up; [experts, width] of experts without gates.
        down: [experts, hidden]; None: another rank adds them.
    """

    gate_up: Tensor
    down: Tensor | None


class AdaptedPairs(NamedTuple):
    """Pairs of a token and one of its experts, some of which have an adapter.

    Attributes:
        numbers: [pairs], each pair's expert; the number of experts here stands for an expert elsewhere.
        slots: [pairs], the slot of each pair's adapter, from 1; 0: it has none.
    """

    numbers: Tensor
    slots: Tensor


def group_adapted_pairs(numbers: Tensor, slots: Tensor, weights: StackedLowRank) -> AdaptedPairs:
    """Prepare a layer's tokens for `lora_of_pairs`.

    Args:
        numbers: [tokens, chosen], each token's experts here, and the number of experts here for others.
        slots: [tokens] int64, as in ExpertAdapters.
        weights: The weights of any of the layer's products.

    Returns:
        The pairs, token by token, in a form of the implementation's own.
    """
    return AdaptedPairs(numbers.flatten(), slots.repeat_interleave(numbers.shape[1]))


def lora_of_pairs(x: Tensor, weights: StackedLowRank, pairs: AdaptedPairs, sharing: int) -> Tensor:
    """Compute B A x of pairs whose token has an adapter and whose expert is here.

    Args:
        x: [pairs / sharing, columns].
        weights: The product's weights.
        pairs: As `group_adapted_pairs` returned them.
        sharing: How many neighbouring pairs have one row of x.

    Returns:
        [pairs, outputs] in x's dtype, to which A x is rounded too, as PEFT does. Other rows may have anything; here
        they are 0.
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


def pack_router(weight: Tensor) -> Tensor:
    """Return a router's weight [experts, hidden] as `router_logits` takes it; here unchanged."""
    return weight


def router_logits(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + bias in fp32, never rounded to the model's dtype: x [tokens, hidden] → [tokens, experts].

    The bias is [experts] fp32.
    """
    return F.linear(x.float(), packed.float(), bias)


def route(
    logits: Tensor,
    routing: Routing,
    first: int = 0,
    count: int | None = None,
    correction: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts by their scores, in fp32 (Shazeer et al. 2017; Mixtral, eq. 1).

    Args:
        logits: [tokens, experts].
        routing: How tokens go to experts.
        first, count: The experts that are here: `first` to `first + count - 1`; None: all are.
        correction: [experts] fp32, added to scores for the choice alone (Wang et al. 2024, loss-free balancing), if
            `routing.correction`.
        dtype: The dtype of the weights; None: the logits'.

    Returns:
        [tokens, chosen] weights, and as many expert numbers, integers from 0 on among those that
        are here; `count` for others.
    """
    x = logits.float()
    if routing.cap is not None:
        x = routing.cap * (x / routing.cap).tanh()
    if routing.scoring == "sparsemixer":
        weights, numbers = _near_the_best(x, routing)
    else:
        scores = _SCORES[routing.scoring](x)
        preferred = scores if correction is None else scores + correction
        if routing.kept_groups < routing.groups:
            preferred = _in_best_groups(preferred, routing)
        numbers = preferred.topk(routing.chosen).indices
        weights = scores.gather(-1, numbers)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon)
    if routing.scale != 1.0:
        weights = weights * routing.scale
    if count is not None:
        local_indices(numbers, first, count, numbers)
    return weights.to(dtype or logits.dtype), numbers


_SCORES: dict[Scoring, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
}


def _in_best_groups(scores: Tensor, routing: Routing) -> Tensor:
    """Return the scores [tokens, experts], -inf in other groups than the best (DeepSeek-V3, section 2.1.2)."""
    by_group = scores.reshape(len(scores), routing.groups, -1)
    of_groups = by_group.topk(2).values.sum(-1) if routing.of_best_two else by_group.amax(-1)
    kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(-1, of_groups.topk(routing.kept_groups).indices, True)
    return by_group.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)


def _near_the_best(x: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return weights and numbers by `sparsemixer` (Liu et al. 2023): each best one's share among logits near its own,
    without those chosen before.
    """
    left, weights, numbers = x, [], []
    for _ in range(routing.chosen):
        most, number = left.max(-1, keepdim=True)
        far = (most - x) / x.abs().maximum(most) > 2 * routing.margin
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, number))
        numbers.append(number)
        left = left.scatter(-1, number, float("-inf"))
    return torch.cat(weights, -1), torch.cat(numbers, -1)


def add_gated(out: Tensor, y: Tensor, gate: Tensor | None = None, factor: float = 1.0) -> None:
    """out = factor · (out + σ(gate) · y), or factor · (out + y): the sum of experts and of an expert of all tokens.

    Args:
        out, y: [tokens, width].
        gate: [tokens, 1] (Qwen 1.5 MoE); None: there is none.
    """
    out.add_(y if gate is None else gate.float().sigmoid().to(y.dtype) * y)
    if factor != 1.0:
        out.mul_(factor)


def pack_experts(weights: Tensor) -> Sequence[Tensor]:
    """Return the weights [experts, rows, columns] as `experts` takes them: one by one."""
    return weights.unbind()


def expert_linear(x: Tensor, weights: Sequence[Any], number: int) -> Tensor:
    """Return x Wᵀ with one expert's weight from `pack_experts`: [tokens, columns] → [tokens, rows]."""
    return F.linear(x, weights[number])


def experts(
    x: Tensor,
    gate_up: Sequence[Any],
    down: Sequence[Any],
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    others: int = 0,
    adapters: ExpertAdapters | None = None,
    activation: Activation = SILU,
    biases: ExpertBiases | None = None,
    linear: Callable[[Tensor, Any, None], Tensor] = F.linear,
) -> None:
    """out = Σ weight · down(activation(gate(x), up(x))) over each token's experts.

    Args:
        x: [tokens, hidden].
        gate_up: [2 · width, hidden] of each expert: gate, then up; [width, hidden] if the activation takes no gate.
        down: [hidden, width] of each expert.
        numbers, weights: [tokens, chosen], as `route` returns them. Experts that are elsewhere add nothing.
        out: [tokens, hidden].
        others: How many experts are elsewhere.
        adapters: What adapters of tokens add to all three products; not on a CPU, whose layers add it themselves.
        activation: What makes one value of a gate and an up, or of an up.
        biases: The biases of the products, in the dtype of x; None: they have none.
        linear: Multiplies x with one of the weights; not an argument of the op.
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
            if biases is not None:
                both += biases.gate_up[expert]
            if adapters is not None:
                both += _added(rows, adapters.gate_up, expert, adapters.slots[own])
            del rows
            middle = activated(both, activation)
            del both
            y = linear(middle, down[expert], None)
            if biases is not None and biases.down is not None:
                y += biases.down[expert]
            if adapters is not None:
                y += _added(middle, adapters.down, expert, adapters.slots[own])
            out.index_add_(0, own, y.mul_(shares[first:end]))
            del middle, y  # or they stand beside the next expert's
        first = end


def pack_coded_experts(stack: Coded, gated: bool, dtype: torch.dtype) -> Coded:
    """Return a stack from `stack_weights` as `coded_experts` takes it; here unchanged.

    Args:
        stack: The weights of all experts.
        gated: Outputs are gates, then ups.
        dtype: The dtype of the rows that the weights are multiplied with.
    """
    return stack


def coded_experts(
    x: Tensor,
    gate_up: Coded,
    down: Coded,
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    others: int = 0,
    adapters: ExpertAdapters | None = None,
    activation: Activation = SILU,
    biases: ExpertBiases | None = None,
) -> None:
    """Compute `experts` with coded weights from `stack_weights`: [experts, 2 · width, hidden], [experts, hidden,
    width].

    Activations stay dense here. A version may quantize them for 8-bit codes, as `scaled_linear` does, and between the
    two products in groups of any size.
    """
    first, second = ([one_of(stack, number) for number in range(_count(stack))] for stack in (gate_up, down))
    experts(x, first, second, numbers, weights, out, others, adapters, activation, biases, linear=_multiply)


adapted_experts, adapted_coded_experts = experts, coded_experts
"""Ops for tokens with adapters, which only GPUs have."""


def stack_weights(count: int, weight_of: Callable[[int], Coded]) -> Coded:
    """Return the weights 0 to count - 1, all alike, as one weight whose tensors have one more dimension in front."""
    first = weight_of(0)
    stacks = {name: value.new_empty((count, *value.shape)) for name, value in _own_tensors(first).items()}
    for number in range(count):
        weight = first if number == 0 else weight_of(number)
        for name, stack in stacks.items():
            stack[number].copy_(getattr(weight, name))
    return first._replace(**stacks)


def one_of(stack: Coded, number: int) -> Coded:
    """Return one weight of a stack."""
    return stack._replace(**{name: value[number] for name, value in _own_tensors(stack).items()})


def _own_tensors(weight: Coded) -> dict[str, Any]:
    fields: dict[str, Any] = weight._asdict()
    return {name: value for name, value in fields.items() if isinstance(value, Tensor) and name not in _SHARED}


def _count(stack: Coded) -> int:
    return len(stack.codes if isinstance(stack, ScaledWeight) else stack.packed)


def _multiply(x: Tensor, weight: Coded, bias: None) -> Tensor:
    return (x.float() @ weight.dense().T).to(x.dtype)


def _added(x: Tensor, weights: StackedLowRank, expert: int, slots: Tensor) -> Tensor:
    """Return what adapters add to one expert's product, for rows with adapters in these slots."""
    return lora_of_pairs(x, weights, AdaptedPairs(torch.full_like(slots, expert), slots), 1)
