"""The beginning of a step by our own kernels: where its rows stand."""

from __future__ import annotations

from torch import Tensor

from quire.compute.kernels.cpu.library import library_for_indices
from quire.compute.kernels.reference import step_inputs as reference


def prepare_inputs(
    slots: Tensor, counts: Tensor, row_of_token: Tensor, offsets: Tensor, ids: Tensor, length: Tensor, last: Tensor,
    dummy: int, starts: Tensor, positions: Tensor, slot_of_token: Tensor, tokens: Tensor,
) -> None:  # fmt: skip
    given, out = (slots, counts, row_of_token, offsets, ids), (starts, positions, slot_of_token, tokens)
    if (kernels := library_for_indices(*given, length, last, *out)) is None:
        reference.prepare_inputs(*given, length, last, dummy, *out)
    else:
        kernels("prepare_inputs", None, *given, len(slots), len(ids), length, last, dummy, *out)
