"""Products at many numbers of rows, so that cuBLAS's kernels are there before anybody waits for them.

cuBLAS loads a kernel when it first chooses it, which takes the host some 2 ms, and a first token waits for up to four.
It chooses by the weight's shape and the number of rows, so that tiles fill the card: a few dozen kernels serve all
steps. Here every distinct product of a model runs once at the numbers of rows that recorded steps have, and at a list
which is dense enough to meet what others need. A thread does so while others import, compile and read: what is
multiplied is memory that nobody wrote. Knows nothing about which kernels there are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quire.layers.layer import Layer, TensorOptions
from quire.layers.linear import Linear
from quire.planning.step_limits import StepLimits
from quire.worker.graph_shapes import GraphShape

_FEW = 128
"""Rows up to which kernels of our own serve most products, so that a power of two is as near as the list must be."""
_STEP = 16
"""Rows between two counts, where they are not few: cuBLAS changes its mind often there, and the first token of a prompt
so short would come half as late again."""
_MANY, _PART = 1_024, 12
"""From so many rows on, a count is larger than the one before by this part of it."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Product:
    """x Wᵀ, or x Wᵀ + b.

    Attributes:
        outputs, columns: Of W.
        has_bias: Whether there is b.
        rows: Numbers of rows of x, the most first: what it needs of memory serves the others.
    """

    outputs: int
    columns: int
    has_bias: bool
    rows: tuple[int, ...]


def row_counts(most: int) -> list[int]:
    """Numbers of rows up to `most`, ascending."""
    counts, rows = [], 1
    while rows < most:
        counts.append(rows)
        rows += rows if rows < _FEW else _STEP if rows < _MANY else rows // _PART
    return [*counts, most]


def products_of(
    layers: Iterable[Layer], vocab_size: int, width: int, largest: StepLimits, recorded: Sequence[GraphShape]
) -> list[Product]:
    """What steps multiply, each shape once.

    Args:
        layers: A model's; all tokens of a step go through their products, but only its reads through the head.
        vocab_size, width: Of the head.
        largest: As many tokens, and reads, as a step may have.
        recorded: Steps whose every product must have run.
    """
    tokens = _descending([*row_counts(largest.tokens), *(shape.tokens for shape in recorded)])
    reads = _descending([*row_counts(largest.rows), *(shape.reads for shape in recorded)])
    linears = [layer for layer in layers if isinstance(layer, Linear) and layer.outputs != vocab_size]
    shapes = dict.fromkeys((layer.outputs, layer.columns, layer.has_bias) for layer in linears)
    return [*(Product(*shape, tokens) for shape in shapes), Product(vocab_size, width, False, reads)]


def begin_use(products: Sequence[Product], options: TensorOptions) -> Future[bool]:
    """Use them in a thread of their own; done when all are launched, and torch has the memory back. See `use_once`."""
    pool = ThreadPoolExecutor(1, "products")
    used = pool.submit(use_once, products, options)
    pool.shutdown(wait=False)
    return used


def use_once(products: Sequence[Product], options: TensorOptions) -> bool:
    """Launch the products. Whether there was room for that; if not, steps load kernels as they need them."""
    if options.device.type == "cuda":
        torch.cuda.synchronize(options.device)  # a new thread has no context before it asks for something: cuBLAS warns
    try:
        with torch.inference_mode():
            weights = _unwritten(max(product.outputs * product.columns for product in products), options)
            inputs = _unwritten(max(product.rows[0] * product.columns for product in products), options)
            for product in products:
                outputs, columns = product.outputs, product.columns
                weight = weights[: outputs * columns].view(outputs, columns)
                bias = weights[:outputs] if product.has_bias else None
                for rows in product.rows:
                    F.linear(inputs[: rows * columns].view(rows, columns), weight, bias)
    except RuntimeError as error:  # cuBLAS and the driver have their own ways to say that there is no room
        _log.info("kernels     products are not used before they are needed: %s", error)
        return False
    return True


def _descending(counts: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(counts), reverse=True))


def _unwritten(size: int, options: TensorOptions) -> torch.Tensor:
    return torch.empty(size, dtype=options.dtype, device=options.device)
