"""Causal convolution of each channel over a few tokens, in one pass."""

from __future__ import annotations

from torch import Tensor

from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.reference import short_conv as reference
from quire.compute.kernels.reference.state_inputs import StateRows

_KERNELS = range(2, 5)
"""Numbers of tokens that the compiled kernel convolves."""


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    rows: StateRows,
    out: Tensor,
    *,
    silu: bool,
    before: Tensor | None = None,
    after: Tensor | None = None,
) -> None:
    """Arguments as in reference/short_conv.py; rows of x, before and after have one stride."""
    kernels, beside = library(), [tensor for tensor in (x, before, after) if tensor is not None]
    strides = {tensor.stride() for tensor in beside}
    is_dense = strides == {(x.stride(0), 1)} and out.stride(1) == 1
    dense = all(tensor is None or tensor.is_contiguous() for tensor in (weight, bias, state, *rows))
    if (
        kernels is None
        or not is_dense
        or not dense
        or len(weight) not in _KERNELS
        or not kernels.serves(x, weight, bias, state, out, before, after)
    ):
        reference.short_conv(x, weight, bias, state, rows, out, silu=silu, before=before, after=after)
        return
    kernels(
        "short_conv", x.dtype, x, before, after, x.stride(0), weight, bias, *weight.shape, silu, state, len(state),
        rows.states, rows.starts, len(rows.states), out, out.stride(0),
    )  # fmt: skip
    kernels.raise_faults()
