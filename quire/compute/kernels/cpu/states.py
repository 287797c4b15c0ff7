"""What a draft head reads of a model, and logits of a part of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.kernels.cpu.library import library_for, library_for_indices
from quire.compute.kernels.reference import states as reference


def copy_stream(x: Tensor, delta: Tensor | None, out: Tensor) -> None:
    kernels = library_for(x, delta)
    if kernels is None or out.stride(1) != 1 or out.dtype != x.dtype:
        reference.copy_stream(x, delta, out)
    else:
        kernels("copy_stream", x.dtype, x, delta, *x.shape, out.stride(0), out)


def multiply(x: Tensor, factor: float) -> None:
    if (kernels := library_for(x)) is None:
        reference.multiply(x, factor)
    else:
        kernels("multiply", x.dtype, x, *x.shape, factor)


def put_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    if (kernels := library_for_indices(x, rows, out)) is None:
        reference.put_rows(x, rows, out)
        return
    assert x.dtype == out.dtype and rows.dtype == torch.int64
    kernels("put_rows", None, x, rows, len(rows), x.shape[1] * x.element_size(), out)


def state_rows(token_ids: Tensor, places: Tensor, slots: Tensor, first: int, out: Tensor) -> None:
    if (kernels := library_for_indices(token_ids, places, slots, out)) is None:
        reference.state_rows(token_ids, places, slots, first, out)
    else:
        kernels("state_rows", None, token_ids, places, slots, len(token_ids), first, out)


def spread_columns(x: Tensor, columns: Tensor, out: Tensor) -> None:
    kernels = library_for(x, out)
    if kernels is None or not columns.is_contiguous():
        reference.spread_columns(x, columns, out)
    else:
        kernels("spread_columns", x.dtype, x, *x.shape, columns, out.shape[1], out)
