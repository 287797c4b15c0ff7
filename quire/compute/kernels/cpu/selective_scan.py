"""Selective state spaces of Mamba, with the states of a vector of channels in the first cache."""

from __future__ import annotations

from torch import Tensor

from quire.compute.kernels.cpu.library import library_for_indices
from quire.compute.kernels.reference import selective_scan as reference
from quire.compute.kernels.reference.state_inputs import StateRows


def selective_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    decay: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    rows: StateRows,
    out: Tensor,
) -> None:
    """Arguments as in reference/selective_scan.py."""
    kernels, inputs = library_for_indices(decay, skip, dt_bias, state, *rows, out), (x, dt, b, c)
    is_dense = all(each.stride(1) == 1 for each in inputs)
    if kernels is None or not is_dense or not kernels.serves(*inputs, out):
        reference.selective_scan(x, dt, b, c, decay, skip, dt_bias, state, rows, out)
        return
    strided = [part for each in inputs for part in (each, each.stride(0))]
    kernels(
        "selective_scan", x.dtype, *strided, decay, skip, dt_bias, *decay.shape, state, len(state), rows.states,
        rows.starts, len(rows.states), out,
    )  # fmt: skip
    kernels.raise_faults()
