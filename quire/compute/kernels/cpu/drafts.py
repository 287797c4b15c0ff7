"""Verification by our own kernels: a step calls each once, where torch would need a dozen calls."""

from __future__ import annotations

from torch import Tensor

from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.reference import drafts as reference
from quire.compute.kernels.reference.sample import SamplingColumns


def position_columns(slots: Tensor, offsets: Tensor, asked: SamplingColumns, out: SamplingColumns) -> None:
    """Arguments as in reference/drafts.py; all are contiguous."""
    if (kernels := library()) is None:
        reference.position_columns(slots, offsets, asked, out)
        return
    assert all(tensor.is_contiguous() for tensor in (slots, offsets, *asked, *out))
    columns = (column.data_ptr() for column in (*asked, *out))
    kernels("position_columns", None, slots.data_ptr(), offsets.data_ptr(), len(slots), *columns)


def verify_drafts(
    tokens: Tensor, faults: Tensor, next_drafts: Tensor, ends: Tensor, slots: Tensor, length: Tensor, last: Tensor,
    drawn: Tensor, recent: Tensor, counts: Tensor,
) -> None:  # fmt: skip
    """Arguments as in reference/drafts.py; all are contiguous."""
    given, columns = (tokens, faults, next_drafts, ends, slots), (length, last, drawn, recent)
    if (kernels := library()) is None:
        reference.verify_drafts(*given, *columns, counts)
        return
    assert all(tensor.is_contiguous() for tensor in (*given, *columns, counts))
    kernels(
        "verify_drafts", None, *(tensor.data_ptr() for tensor in given), len(ends),
        *(tensor.data_ptr() for tensor in columns), recent.shape[1], counts.data_ptr(),
    )  # fmt: skip
