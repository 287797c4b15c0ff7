"""Which modules of a model adapters may change, and which part of each is this rank's.

A module is divided as its weight is. If its outputs are divided, a rank has rows of B and all of A; if its inputs are,
the rank has columns of A and all of B. B A x of the rank's inputs is then a summand, like the rank's product that it is
added to, so the sum over ranks that follows is the only one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.compute.mesh import Span
from quire.models.quantization.scheme import LinearPart, LinearShape


@dataclass(frozen=True)
class TargetPart:
    """What this rank has of a module, and where.

    Attributes:
        update: The number of the product that has the module.
        module: The module's number in that product.
        begin: Where the module's outputs begin among the product's.
        rows, columns: Which of the whole module's outputs and inputs the rank has, side by side.
        adds_bias: Whether this rank adds the module's bias.
    """

    update: int
    module: int
    begin: int
    rows: tuple[Span, ...]
    columns: tuple[Span, ...]
    adds_bias: bool = True

    @property
    def outputs(self) -> slice:
        """Where the module's outputs are among the product's."""
        return slice(self.begin, self.begin + sum(span.count for span in self.rows))


@dataclass(frozen=True)
class Target:
    """A module that adapters may change.

    Attributes:
        rows, columns: The module's outputs and inputs, undivided.
        transposed: Whether the base model's weight is stored as [columns, rows].
        part: This rank's part; None: only other ranks have parts.
    """

    rows: int
    columns: int
    transposed: bool = False
    part: TargetPart | None = None


def targets_of(update: int, shape: LinearShape, part: LinearPart | None) -> Iterator[tuple[str, Target]]:
    """Yield the modules of product number `update`, by name. `shape` is the shape of this rank's weight."""
    whole, cuts, adds_bias = (shape, {}, True) if part is None else (part.whole, part.cuts, part.adds_bias)
    begin, all_columns = 0, (Span(0, whole.columns),)
    for module, (name, own, rows) in enumerate(zip(shape.names, shape.rows, whole.rows, strict=True)):
        spans = cuts[name].spans if name in cuts else (Span(0, rows),)
        if shape.columns == whole.columns:
            place = TargetPart(update, module, begin, spans, all_columns, adds_bias)
        else:
            place = TargetPart(update, module, begin, (Span(0, rows),), spans, adds_bias)
        yield name, Target(rows, whole.columns, whole.transposed, place)
        begin += own


def take_spans(x: Tensor, dimension: int, spans: Sequence[Span]) -> Tensor:
    """These entries of x along a dimension, side by side."""
    parts = [x.narrow(dimension, span.start, span.count) for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dimension)
