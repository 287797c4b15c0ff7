"""Products at many numbers of rows, so that cuBLAS's kernels are there before anybody waits for them.

cuBLAS loads a kernel when it first chooses it, which takes the host some 2 ms, and a first token waits for up to four.
It chooses by the weight's shape and the number of rows, so that tiles fill the card: a few dozen kernels serve all
steps. Here every distinct product of a model runs once at a list of row counts which is dense enough to meet them.
Knows nothing about which kernels there are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quire.layers.layer import Layer, Place
from quire.layers.linear import Linear
from quire.models.model import Model
from quire.worker.runner import LargestStep

_FEW = 128
"""Rows up to which a model's products are not those used here: kernels of our own serve most, and a rehearsal has met
the others.
"""
_STEP = 16
"""Rows between two counts, where there are few rows."""
_PART = 12
"""A count is at most this part of it larger than the one before, where there are many."""


def row_counts(most: int) -> list[int]:
    """Numbers of rows, more than few, up to `most`; descending: what the first needs of memory serves the others."""
    counts, rows = [], _FEW + _STEP
    while rows < most:
        counts.append(rows)
        rows += max(_STEP, rows // _PART)
    return [*([most] if most > _FEW else []), *reversed(counts)]


def distinct_products(layers: Iterable[Layer], vocab_size: int) -> list[Linear]:
    """One of each shape among the products that all tokens of a step go through, that is, without the head."""
    found: dict[tuple[int, int, bool], Linear] = {}
    for layer in layers:
        if isinstance(layer, Linear) and layer.outputs != vocab_size:
            found.setdefault((layer.outputs, layer.columns, layer.has_bias), layer)
    return list(found.values())


def use_once(products: Iterable[Linear], model: Model, width: int, largest: LargestStep, place: Place) -> None:
    """Launch the products, on values that nobody wrote.

    Args:
        products: Those of all tokens.
        model: Its head takes the rows that are read.
        width: Of the head's input.
        largest: As many tokens, and reads, as a step may have.
        place: Where they are, and as what.
    """
    with torch.inference_mode():
        for product in products:
            x = _unwritten(largest.tokens, product.columns, place)
            for rows in row_counts(largest.tokens):
                product(x[:rows])
        x = _unwritten(largest.rows, width, place)
        for rows in row_counts(largest.rows):
            model.logits(x[:rows])


def _unwritten(rows: int, columns: int, place: Place) -> Tensor:
    return torch.empty((rows, columns), dtype=place.dtype, device=place.device)
