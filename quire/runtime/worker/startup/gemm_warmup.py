"""Runs each of a model's matrix products once for many row counts, so that cuBLAS loads its kernels before requests
come.

cuBLAS takes the host about 2 ms to load a kernel at first use, and a first token could wait for four of them. It
selects a kernel by the weight's shape and the number of rows. So each product runs for the row counts of the captured
CUDA graphs, and for enough others to find the few dozen kernels of all steps. A thread does this on uninitialised
memory while the start imports, compiles and reads weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quire.models.layers.layer import Layer
from quire.models.layers.linear import Linear
from quire.models.weights.tensor_options import TensorOptions
from quire.planning.step_limits import StepLimits
from quire.runtime.worker.graph_shapes import GraphShape

_FEW_ROWS = 128
"""Quire's own kernels serve most products up to this number of rows, so powers of two are dense enough below it."""
_STEP = 16
"""Distance between row counts from `_FEW_ROWS` to `_MANY_ROWS`, where cuBLAS often selects another kernel."""
_MANY_ROWS = 1_024
_GROWTH = 12
"""From `_MANY_ROWS` on, each row count is a twelfth larger than the one before."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gemm:
    """A product x Wᵀ, or x Wᵀ + b, where W is [outputs, columns]. `rows` are the row counts of x in descending order,
    so that the memory of the first serves the others."""

    outputs: int
    columns: int
    has_bias: bool
    rows: tuple[int, ...]


def row_counts(most: int) -> list[int]:
    """Return the row counts to run, ascending, with `most` as the last."""
    counts, rows = [], 1
    while rows < most:
        counts.append(rows)
        rows += rows if rows < _FEW_ROWS else _STEP if rows < _MANY_ROWS else rows // _GROWTH
    return [*counts, most]


def gemms_of(
    layers: Iterable[Layer], vocab_size: int, width: int, largest: StepLimits, captured: Sequence[GraphShape]
) -> list[Gemm]:
    """Return the matrix products of a model's steps, each weight shape once.

    Args:
        layers: The model's layers. Sampled positions alone go through the head, all tokens through the others.
        vocab_size, width: The shape of the head.
        largest: The limits of a step's tokens and rows.
        captured: Shapes of CUDA graphs. Every product in them must have run before capture.
    """
    tokens = _descending([*row_counts(largest.tokens), *(shape.tokens for shape in captured)])
    reads = _descending([*row_counts(largest.rows), *(shape.sampled for shape in captured)])
    linears = [layer for layer in layers if isinstance(layer, Linear) and layer.library_product == "linear"]
    linears = [layer for layer in linears if layer.outputs != vocab_size]
    shapes = dict.fromkeys((layer.outputs, layer.columns, layer.has_bias) for layer in linears)
    return [*(Gemm(*shape, tokens) for shape in shapes), Gemm(vocab_size, width, False, reads)]


def start_warmup(gemms: Sequence[Gemm], options: TensorOptions) -> Future[bool]:
    """Run the products in a new thread, and return the future result of `run_gemms`. Once it is done, torch has the
    products' memory back."""
    pool = ThreadPoolExecutor(1, "gemm-warmup")
    launched = pool.submit(run_gemms, gemms, options)
    pool.shutdown(wait=False)
    return launched


def run_gemms(gemms: Sequence[Gemm], options: TensorOptions) -> bool:
    """Launch every product. Returns False if memory was missing; later steps then load kernels when they need them."""
    if options.device.type == "cuda":
        torch.cuda.synchronize(options.device)  # gives this thread a CUDA context; without one cuBLAS warns
    try:
        with torch.inference_mode():
            weights = _uninitialised(max(gemm.outputs * gemm.columns for gemm in gemms), options)
            inputs = _uninitialised(max(gemm.rows[0] * gemm.columns for gemm in gemms), options)
            for gemm in gemms:
                outputs, columns = gemm.outputs, gemm.columns
                weight = weights[: outputs * columns].view(outputs, columns)
                bias = weights[:outputs] if gemm.has_bias else None
                for rows in gemm.rows:
                    F.linear(inputs[: rows * columns].view(rows, columns), weight, bias)
    except RuntimeError as error:  # cuBLAS and the driver report missing memory each in their own way
        _log.info("kernels     matrix products are not warmed up: %s", error)
        return False
    return True


def _descending(counts: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(counts), reverse=True))


def _uninitialised(size: int, options: TensorOptions) -> torch.Tensor:
    return torch.empty(size, dtype=options.dtype, device=options.device)
