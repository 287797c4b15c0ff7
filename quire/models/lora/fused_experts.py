"""Adapters of all experts of a layer as PEFT stores them, cut into one for each expert and projection.

PEFT wraps the parameters of transformers' stacked experts (`target_parameters`): A of all experts lie below each other,
and in B the expert is the last of the indices of a column. Where both parameters of a layer are wrapped, one wraps the
other, and their names say which one is outside, but not which one it is: shapes do.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from quire.models.quantization.scheme import ExpertsShape

_WRAPPED = ".base_layer"
GATE_UP, DOWN = "gate_up_proj", "down_proj"


def experts_of(module: str) -> str:
    """The module of experts that a tensor of this module is of."""
    return module.removesuffix(_WRAPPED)


def parameter_of(shape: ExpertsShape, a: tuple[int, ...], b: tuple[int, ...]) -> str | None:
    """Which parameter tensors of these shapes change: GATE_UP or DOWN; None: neither."""
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        return None
    return {(shape.hidden, 2 * shape.width): GATE_UP, (shape.width, shape.hidden): DOWN}.get((a[1], b[0]))


def by_expert(shape: ExpertsShape, parameter: str, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Of each expert's projections the module's name, A [rank, columns] and B [rows, rank].

    Args:
        shape: Of the experts.
        parameter: See parameter_of.
        a: [experts · rank, columns].
        b: [rows, rank · experts].
    """
    all_a = a.view(shape.count, -1, a.shape[1])
    all_b = b.view(len(b), -1, shape.count)
    names = shape.names
    for number in range(shape.count):
        own_a, own_b = all_a[number], all_b[:, :, number]
        expert = f"{shape.name}.{number}"
        if parameter == DOWN:
            yield f"{expert}.{names.down}", own_a, own_b
            continue
        gate, up = own_b.chunk(2)
        yield f"{expert}.{names.gate}", own_a, gate
        yield f"{expert}.{names.up}", own_a, up
