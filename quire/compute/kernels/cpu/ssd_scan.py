"""Selective state spaces of Mamba2, with blocks of the state in registers."""

from __future__ import annotations

import math

from torch import Tensor

from quire.compute.kernels.cpu.library import library_for_indices
from quire.compute.kernels.reference import ssd_scan as reference
from quire.compute.kernels.reference.state_inputs import StateRows


def ssd_scan(
    xbc: Tensor,
    dt: Tensor,
    decay: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    rows: StateRows,
    out: Tensor,
    *,
    dt_bounds: tuple[float, float] = (0.0, math.inf),
) -> None:
    """Arguments as in reference/ssd_scan.py."""
    kernels, (heads, n, p) = library_for_indices(decay, skip, dt_bias, state, *rows, out), state.shape[1:]
    is_dense = xbc.stride(1) == 1 and dt.stride(1) == 1
    if kernels is None or n % 4 or not is_dense or not kernels.serves(xbc, dt, out):
        reference.ssd_scan(xbc, dt, decay, skip, dt_bias, state, rows, out, dt_bounds=dt_bounds)
        return
    groups = (xbc.shape[1] - heads * p) // (2 * n)
    kernels(
        "ssd_scan", xbc.dtype, xbc, xbc.stride(0), dt, dt.stride(0), decay, skip, dt_bias, *dt_bounds, heads, groups, n,
        p, state, len(state), rows.states, rows.starts, len(rows.states), out,
    )  # fmt: skip
    kernels.raise_faults()
