"""Gates of attention's output in one pass."""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch

_BLOCK = 1024


def gate_heads(x: Tensor, gate: Tensor, activation: Literal["sigmoid", "softplus"]) -> None:
    """Implement reference/output_gate.py's `gate_heads`; tokens of the gate may lie apart."""
    (tokens, heads, d), each = x.shape, gate.shape[2]
    assert x.is_contiguous() and gate.stride()[1:] == (each, 1)
    if not tokens:
        return
    overlap = can_overlap(x.device)
    _gate_heads[(tokens, cdiv(heads * d, _BLOCK))](
        x, gate, gate.stride(0),
        WIDTH=heads * d, SHARED=d // each, SOFTPLUS=activation == "softplus", BLOCK=_BLOCK, OVERLAP=overlap,
        num_warps=4, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit
def _gate_heads(
    x, gate, gate_token,
    WIDTH: tl.constexpr, SHARED: tl.constexpr, SOFTPLUS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Gate a part of a token's heads; SHARED elements have one gate."""
    release_dependents(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    wait_for_inputs(OVERLAP)
    values = tl.load(x + token * WIDTH + at, mask, 0.0)
    gates = tl.load(gate + token * gate_token + at // SHARED, mask, 0.0).to(tl.float32)
    if SOFTPLUS:
        factor = tl.where(gates > 20.0, gates, tl.log(1.0 + tl.exp(tl.minimum(gates, 20.0))))
    else:
        factor = 1.0 / (1.0 + tl.exp(-gates))
    factor = factor.to(values.dtype).to(tl.float32)
    tl.store(x + token * WIDTH + at, (values.to(tl.float32) * factor).to(values.dtype), mask)
