"""Root mean square norms beside a gate: a program norms one group of a token."""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import fast_launch


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    group: int,
    out: Tensor,
    *,
    norm_first: bool,
    activation: Literal["silu", "sigmoid"] = "silu",
) -> None:
    """Arguments as in reference/gated_norm.py."""
    tokens, width = x.shape
    assert x.is_contiguous() and out.is_contiguous() and gate.stride(1) == 1
    if not tokens:
        return
    overlap, block = can_overlap(x.device), triton.next_power_of_2(group)
    _gated_norm[(tokens, width // group)](
        x, gate, gate.stride(0), weight, eps, out,
        WIDTH=width, GROUP=group, WEIGHTS=group if weight is None else weight.numel(), NORM_FIRST=norm_first,
        SIGMOID=activation == "sigmoid", BLOCK=block, OVERLAP=overlap,
        num_warps=max(1, min(16, block // 256)), launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit
def _gated_norm(
    x, gate, gate_token, weight, eps, out,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, WEIGHTS: tl.constexpr, NORM_FIRST: tl.constexpr, SIGMOID: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Norm a group of a token, before or behind its gate."""
    release_dependents(OVERLAP)
    token, inner = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, mask = tl.program_id(1) * GROUP + inner, inner < GROUP
    wait_for_inputs(OVERLAP)
    y = tl.load(x + token * WIDTH + at, mask, 0.0).to(tl.float32)
    gates = tl.load(gate + token * gate_token + at, mask, 0.0).to(tl.float32)
    factor = 1.0 / (1.0 + tl.exp(-gates))
    if not SIGMOID:
        factor *= gates
    if not NORM_FIRST:
        y *= factor
    if weight is not None:
        y /= tl.sqrt(tl.sum(y * y, 0) / GROUP + eps)
        y *= tl.load(weight + at % WEIGHTS, mask, 0.0).to(tl.float32)
    if NORM_FIRST:
        y *= factor
    tl.store(out + token * WIDTH + at, y.to(out.dtype.element_ty), mask)
