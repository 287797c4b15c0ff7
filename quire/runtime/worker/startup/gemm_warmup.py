"""Runs each of a model's matrix products once at many numbers of rows, so that cuBLAS has loaded its kernels by then.

cuBLAS loads a kernel when it first selects it. That takes the host some 2 ms, and a first token can wait for up to four
of them. It selects by the weight's shape and the number of rows, so that tiles fill the GPU; a few dozen kernels serve
all steps. Each distinct product runs once at the numbers of rows of captured CUDA graphs, and at a list dense enough to
meet what other steps need. This happens in a thread while others import, compile and read weights, on uninitialised
memory. Knows nothing about which kernels cuBLAS has.
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
"""Our own kernels serve most products up to this number of rows, so below it powers of two are dense enough."""
_STEP = 16
"""Distance between two numbers of rows from `_FEW_ROWS` to `_MANY_ROWS`, where cuBLAS often selects another kernel."""
_MANY_ROWS = 1_024
_GROWTH = 12
"""From `_MANY_ROWS` on, each number of rows is larger than the one before by a twelfth of it."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gemm:
    """x Wᵀ, or x Wᵀ + b.

    Attributes:
        outputs, columns: Of W.
        has_bias: Whether there is b.
        rows: Numbers of rows of x, descending: the memory of the first serves the others.
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
        rows += rows if rows < _FEW_ROWS else _STEP if rows < _MANY_ROWS else rows // _GROWTH
    return [*counts, most]


def gemms_of(
    layers: Iterable[Layer], vocab_size: int, width: int, largest: StepLimits, captured: Sequence[GraphShape]
) -> list[Gemm]:
    """The products of a model's steps, each shape once.

    Args:
        layers: A model's. All tokens of a step go through them, but only sampled positions go through the head.
        vocab_size, width: Of the head.
        largest: Most tokens and rows of a step.
        captured: Steps of CUDA graphs, whose every product must have run before capture.
    """
    tokens = _descending([*row_counts(largest.tokens), *(shape.tokens for shape in captured)])
    reads = _descending([*row_counts(largest.rows), *(shape.sampled for shape in captured)])
    linears = [layer for layer in layers if isinstance(layer, Linear) and layer.library_product == "linear"]
    linears = [layer for layer in linears if layer.outputs != vocab_size]
    shapes = dict.fromkeys((layer.outputs, layer.columns, layer.has_bias) for layer in linears)
    return [*(Gemm(*shape, tokens) for shape in shapes), Gemm(vocab_size, width, False, reads)]


def start_warmup(gemms: Sequence[Gemm], options: TensorOptions) -> Future[bool]:
    """Run the products in a thread of its own. The future is done when all are launched and torch has their memory
    back; its result is that of `run_gemms`.
    """
    pool = ThreadPoolExecutor(1, "gemm-warmup")
    launched = pool.submit(run_gemms, gemms, options)
    pool.shutdown(wait=False)
    return launched


def run_gemms(gemms: Sequence[Gemm], options: TensorOptions) -> bool:
    """Launch every product. False if there was not enough memory: steps then load kernels as they need them."""
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
