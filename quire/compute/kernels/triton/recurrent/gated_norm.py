"""Root mean square norms beside a gate: a program norms some groups of tokens."""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch

_ELEMENTS = 4096
"""The most that a program norms at once."""
_PROGRAMS = 2048
"""With fewer groups than this, each has a program of its own."""


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
    overlap, block, groups = can_overlap(x.device), triton.next_power_of_2(group), tokens * (width // group)
    several = max(1, min(_ELEMENTS // block, triton.next_power_of_2(cdiv(groups, _PROGRAMS))))
    _gated_norm[(cdiv(groups, several),)](
        x, gate, gate.stride(0), weight, eps, out, groups,
        WIDTH=width, GROUP=group, WEIGHTS=group if weight is None else weight.numel(), NORM_FIRST=norm_first,
        SIGMOID=activation == "sigmoid", BLOCK=block, SEVERAL=several, OVERLAP=overlap,
        num_warps=max(1, min(16, several * block // 256)), launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit
def _gated_norm(
    x, gate, gate_token, weight, eps, out, groups,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, WEIGHTS: tl.constexpr, NORM_FIRST: tl.constexpr, SIGMOID: tl.constexpr,
    BLOCK: tl.constexpr, SEVERAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Norm some groups of tokens, before or behind their gates."""
    release_dependents(OVERLAP)
    number, inner = tl.program_id(0).to(tl.int64) * SEVERAL + tl.arange(0, SEVERAL), tl.arange(0, BLOCK)
    of_token: tl.constexpr = WIDTH // GROUP
    token, mask = (number // of_token)[:, None], (number < groups)[:, None] & (inner < GROUP)[None, :]
    at = ((number % of_token) * GROUP)[:, None] + inner[None, :]
    wait_for_inputs(OVERLAP)
    y = tl.load(x + token * WIDTH + at, mask, 0.0).to(tl.float32)
    gates = tl.load(gate + token * gate_token + at, mask, 0.0).to(tl.float32)
    factor = 1.0 / (1.0 + tl.exp(-gates))
    if not SIGMOID:
        factor *= gates
    if not NORM_FIRST:
        y *= factor
    if weight is not None:
        y /= tl.sqrt(tl.sum(y * y, 1) / GROUP + eps)[:, None]
        y *= tl.load(weight + at % WEIGHTS, mask, 0.0).to(tl.float32)
    if NORM_FIRST:
        y *= factor
    tl.store(out + token * WIDTH + at, y.to(out.dtype.element_ty), mask)
