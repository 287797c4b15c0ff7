"""Experts on packed weights: which ones a token goes to, and their products, without a look at the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from quire.compute.kernels.activations import SILU, Activation
from quire.compute.kernels.cpu.embedding import local_indices
from quire.compute.kernels.cpu.library import library, library_for
from quire.compute.kernels.cpu.linear import PANEL, PackedWeight, linear, pack_linear, packed_shape
from quire.compute.kernels.reference import experts as reference
from quire.compute.kernels.reference.experts import ExpertBiases
from quire.compute.kernels.routing import Routing, Scoring

_SCORINGS = get_args(Scoring)
"""The scorings by the numbers that the kernel gives them."""
_ALIGNED = 64
"""Bytes to a multiple of which the kernel places its intermediate results."""
Packed = Sequence[Tensor | PackedWeight] | PackedWeight
"""The weights of all experts: one weight whose `data` has a dimension more, or one for each expert."""


def pack_router(weight: Tensor) -> Tensor | PackedWeight:
    return pack_linear(weight.float())


def router_logits(x: Tensor, packed: Tensor | PackedWeight, bias: Tensor | None) -> Tensor:
    kernels = library_for(x)
    if x.dtype == torch.float32 or kernels is None:
        return linear(x if x.dtype == torch.float32 else x.float(), packed, bias)
    wide = torch.empty(x.shape, dtype=torch.float32)
    kernels("widen", x.dtype, x, *x.shape, wide)
    return linear(wide, packed, bias)


def route(
    logits: Tensor,
    routing: Routing,
    first: int = 0,
    count: int | None = None,
    correction: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Among equally likely experts the first ones are taken."""
    if (kernels := library_for(logits)) is None or dtype not in (None, logits.dtype, torch.bfloat16):
        return reference.route(logits, routing, first, count, correction, dtype)
    (tokens, experts), chosen = logits.shape, routing.chosen
    weights = torch.empty((tokens, chosen), dtype=logits.dtype)
    numbers = torch.empty((tokens, chosen), dtype=torch.int64)
    if routing.is_softmax:
        kernels("route", logits.dtype, logits, tokens, experts, chosen, routing.renormalise, weights, numbers)
    else:
        kernels(
            "route_by_scores", logits.dtype, logits, tokens, experts, chosen, routing.renormalise,
            _SCORINGS.index(routing.scoring), routing.groups, routing.kept_groups, routing.of_best_two, routing.scale,
            routing.epsilon, routing.cap or 0.0, routing.margin, correction, weights, numbers,
        )  # fmt: skip
    if dtype is not None and dtype != weights.dtype:
        assert weights.dtype == torch.float32, "only logits in fp32 have weights of another dtype"
        narrow = torch.empty((tokens, chosen), dtype=dtype)
        kernels("narrow", dtype, weights, tokens, chosen, narrow)
        weights = narrow
    if count is None:
        return weights, numbers
    own = torch.empty_like(numbers)
    local_indices(numbers.view(-1), first, count, own.view(-1))
    return weights, own


def add_gated(out: Tensor, y: Tensor, gate: Tensor | None = None, factor: float = 1.0) -> None:
    if (kernels := library_for(out, y, *(() if gate is None else (gate,)))) is None:
        reference.add_gated(out, y, gate, factor)
    else:
        kernels("add_gated", out.dtype, out, y, gate, *out.shape, factor)


def pack_experts(weights: Tensor) -> Packed:
    kernels = library()
    if kernels is None or not kernels.serves(weights) or weights.stride(2) != 1:
        return [pack_linear(weight) for weight in weights]
    count, rows, columns = weights.shape
    data = torch.empty((count, *packed_shape(rows, columns, weights.element_size())), dtype=weights.dtype)
    for weight, place in zip(weights, data, strict=True):
        kernels("pack", weight.dtype, weight, weight.stride(0), rows, columns, place)
    return PackedWeight(data, rows, columns, kernels)


def expert_linear(x: Tensor, weights: Packed, number: int) -> Tensor:
    if isinstance(weights, PackedWeight):
        return linear(x, weights._replace(data=weights.data[number]), None)
    return linear(x, weights[number], None)


def experts(
    x: Tensor,
    gate_up: Packed,
    down: Packed,
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    others: int = 0,
    activation: Activation = SILU,
    biases: ExpertBiases | None = None,
) -> None:
    if not isinstance(gate_up, PackedWeight) or not isinstance(down, PackedWeight):
        reference.experts(
            x, gate_up, down, numbers, weights, out, others, linear=linear, activation=activation, biases=biases
        )
        return
    (tokens, hidden), count, width, chosen = x.shape, len(gate_up.data), down.columns, numbers.shape[1]
    assert all(tensor.is_contiguous() for tensor in (x, numbers, weights, out))
    assert x.dtype == weights.dtype == out.dtype == gate_up.data.dtype and numbers.dtype == torch.int64
    assert (gate_up.rows, gate_up.columns, down.rows) == (activation.products * width, hidden, hidden)
    fused = gate_up.rows % (2 * PANEL) == 0 and activation == SILU
    of_gate_up, of_down = biases or (None, None)
    limit = math.inf if activation.limit is None else activation.limit
    alpha = {"gelu": 0.0, "relu2": -1.0}.get(activation.kind, activation.alpha)
    item = x.element_size()
    memory = torch.empty(workspace_bytes(tokens, count, hidden, width, chosen, item, fused), dtype=torch.uint8)
    gate_up.library(
        "experts", x.dtype, x, tokens, gate_up.data, gate_up.data.numel() // count, down.data,
        down.data.numel() // count, count, hidden, width, fused, alpha, activation.added, limit,
        of_gate_up, of_down, numbers, weights, chosen, memory, out,
    )  # fmt: skip


def workspace_bytes(tokens: int, count: int, hidden: int, width: int, chosen: int, element: int, fused: bool) -> int:
    """Return the bytes of the kernel's intermediate results, a linear function of the tokens.

    Elements have `element` bytes; `fused` says that gates are applied as products are written.
    """
    ungated = 0 if fused else 2 * width
    each = 8 * chosen + 4 * hidden + element * (2 * hidden + width + ungated)
    pieces = 7
    return tokens * each + 8 * (count + 2) + pieces * _ALIGNED
