"""Experts whose weights are codes with scales, all of one layer's together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from quire.compute.kernels.reference.codebook_linear import CodebookWeight
from quire.compute.kernels.reference.expert_adapters import ExpertAdapters
from quire.compute.kernels.reference.experts import experts
from quire.compute.kernels.reference.grouped_linear import GroupedWeight
from quire.compute.kernels.reference.scaled_linear import ScaledWeight

Coded = GroupedWeight | CodebookWeight | ScaledWeight
_SHARED = ("table",)


def stack_weights(count: int, weight_of: Callable[[int], Coded]) -> Coded:
    """The weights 0 to count - 1, all alike, as one whose tensors have one more dimension in front."""
    first = weight_of(0)
    stacks = {name: value.new_empty((count, *value.shape)) for name, value in _own_tensors(first).items()}
    for number in range(count):
        weight = first if number == 0 else weight_of(number)
        for name, stack in stacks.items():
            stack[number].copy_(getattr(weight, name))
    return _replaced(first, stacks)


def one_of(stack: Coded, number: int) -> Coded:
    """A weight of a stack."""
    return _replaced(stack, {name: value[number] for name, value in _own_tensors(stack).items()})


def _own_tensors(weight: Coded) -> dict[str, Tensor]:
    fields: dict[str, Any] = weight._asdict()
    return {name: value for name, value in fields.items() if isinstance(value, Tensor) and name not in _SHARED}


def _replaced(weight: Coded, tensors: dict[str, Tensor]) -> Coded:
    fields: dict[str, Any] = {**weight._asdict(), **tensors}
    return type(weight)(**fields)


def coded_experts(
    x: Tensor, gate_up: Coded, down: Coded, numbers: Tensor, weights: Tensor, out: Tensor, others: int = 0
) -> None:
    """As the op `experts`, with weights from `stack_weights`: [experts, 2 · width, hidden], [experts, hidden, width].

    Activations stay dense here. A version may quantize those of 8-bit codes as `scaled_linear` does, between the two
    products in groups of any size.
    """
    experts(x, _all(gate_up), _all(down), numbers, weights, out, others, linear=_multiply)


def adapted_coded_experts(
    x: Tensor,
    gate_up: Coded,
    down: Coded,
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    others: int,
    adapters: ExpertAdapters,
) -> None:
    """As `coded_experts`; adapters of tokens add to all three products."""
    experts(x, _all(gate_up), _all(down), numbers, weights, out, others, _multiply, adapters)


def _all(stack: Coded) -> Sequence[Coded]:
    count = len(stack.codes if isinstance(stack, ScaledWeight) else stack.packed)
    return [one_of(stack, number) for number in range(count)]


def _multiply(x: Tensor, weight: Coded, bias: None) -> Tensor:
    return (x.float() @ weight.dense().T).to(x.dtype)
