"""The beginning of a step by our own kernels: where its rows stand."""

from __future__ import annotations

from torch import Tensor

from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.reference import step_inputs as reference


def prepare_inputs(
    slots: Tensor, counts: Tensor, row_of_token: Tensor, offsets: Tensor, ids: Tensor, length: Tensor, last: Tensor,
    dummy: int, starts: Tensor, positions: Tensor, slot_of_token: Tensor, tokens: Tensor,
) -> None:  # fmt: skip
    """Arguments as in reference/step_inputs.py; all are contiguous."""
    kernels = library()
    given, columns, found = (
        (slots, counts, row_of_token, offsets, ids),
        (length, last),
        (starts, positions, slot_of_token),
    )
    if kernels is None:
        reference.prepare_inputs(*given, *columns, dummy, *found, tokens)
        return
    assert all(tensor.is_contiguous() for tensor in (*given, *columns, *found, tokens))
    kernels(
        "prepare_inputs", None, *(tensor.data_ptr() for tensor in given), len(slots), len(ids), length.data_ptr(),
        last.data_ptr(), dummy, *(tensor.data_ptr() for tensor in found), tokens.data_ptr(),
    )  # fmt: skip
