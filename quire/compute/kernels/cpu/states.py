"""What a draft head reads of a model, and logits of a part of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.kernels.cpu.library import address, library
from quire.compute.kernels.reference import states as reference


def copy_stream(x: Tensor, delta: Tensor | None, out: Tensor) -> None:
    """Arguments as in reference/states.py."""
    kernels = library()
    whole = x.is_contiguous() and out.stride(1) == 1 and (delta is None or delta.is_contiguous())
    if kernels is None or not whole or not kernels.serves(x, out, delta):
        reference.copy_stream(x, delta, out)
        return
    kernels("copy_stream", x.dtype, x.data_ptr(), address(delta), *x.shape, out.stride(0), out.data_ptr())


def put_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """Arguments as in reference/states.py."""
    kernels = library()
    if kernels is None or not (x.is_contiguous() and rows.is_contiguous() and out.is_contiguous()):
        reference.put_rows(x, rows, out)
        return
    assert x.dtype == out.dtype and rows.dtype == torch.int64
    kernels("put_rows", None, x.data_ptr(), rows.data_ptr(), len(rows), x.shape[1] * x.element_size(), out.data_ptr())


def state_rows(token_ids: Tensor, places: Tensor, slots: Tensor, first: int, out: Tensor) -> None:
    """Arguments as in reference/states.py."""
    kernels = library()
    if kernels is None or not all(each.is_contiguous() for each in (token_ids, places, slots, out)):
        reference.state_rows(token_ids, places, slots, first, out)
        return
    pointers = token_ids.data_ptr(), places.data_ptr(), slots.data_ptr()
    kernels("state_rows", None, *pointers, len(token_ids), first, out.data_ptr())


def spread_columns(x: Tensor, columns: Tensor, out: Tensor) -> None:
    """Arguments as in reference/states.py."""
    kernels = library()
    whole = x.is_contiguous() and columns.is_contiguous() and out.is_contiguous()
    if kernels is None or not whole or not kernels.serves(x, out):
        reference.spread_columns(x, columns, out)
        return
    kernels("spread_columns", x.dtype, x.data_ptr(), *x.shape, columns.data_ptr(), out.shape[1], out.data_ptr())
