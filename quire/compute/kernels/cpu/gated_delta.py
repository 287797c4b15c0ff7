"""The gated delta rule, with a block of the state in the first cache."""

from __future__ import annotations

from torch import Tensor

from quire.compute.kernels.cpu.library import library_for_indices
from quire.compute.kernels.reference import gated_delta as reference
from quire.compute.kernels.reference.state_inputs import StateRows


def gated_delta(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    decay: Tensor,
    a_bias: Tensor,
    state: Tensor,
    rows: StateRows,
    out: Tensor,
    *,
    factor: float = 1.0,
    bound: float | None = None,
) -> None:
    """Arguments as in reference/gated_delta.py."""
    kernels, (values, dk, dv) = library_for_indices(decay, a_bias, state, *rows, out), state.shape[1:]
    is_dense = qkv.stride(1) == a.stride(1) == b.stride(1) == 1
    if kernels is None or not is_dense or not kernels.serves(qkv, a, b, out):
        reference.gated_delta(qkv, a, b, decay, a_bias, state, rows, out, factor=factor, bound=bound)
        return
    keys = (qkv.shape[1] - values * dv) // (2 * dk)
    kernels(
        "gated_delta", qkv.dtype, qkv, qkv.stride(0), a, a.stride(0), b, b.stride(0), decay, a_bias,
        a_bias.numel() // values, keys, values, dk, dv, state, len(state), rows.states, rows.starts, len(rows.states),
        out, factor, bound or 0.0,
    )  # fmt: skip
    kernels.raise_faults()
