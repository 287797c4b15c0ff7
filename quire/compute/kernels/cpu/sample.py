"""Sampling by our own kernel: one pass over a row of logits where it is greedy."""

from __future__ import annotations

from torch import Tensor

from quire.compute.kernels.cpu.library import address, library
from quire.compute.kernels.reference import sample as reference
from quire.compute.kernels.reference.sample import SamplingColumns, SamplingThresholds
from quire.sampling_params import MIN_TEMPERATURE


def sample(
    logits: Tensor,
    slots: Tensor,
    asked: SamplingColumns,
    tokens: Tensor,
    faults: Tensor,
    last: Tensor | None = None,
    thresholds: SamplingThresholds | None = None,
) -> None:
    """Arguments as in reference/sample.py."""
    kernels = library()
    others = (slots, *asked, tokens, faults, *(thresholds or ()))
    whole = logits.stride(1) == 1 and all(tensor.is_contiguous() for tensor in others)
    if kernels is None or not whole or not kernels.serves(logits):
        reference.sample(logits, slots, asked, tokens, faults, last, thresholds)
        return
    kernels(
        "sample",
        logits.dtype,
        logits.data_ptr(),
        logits.stride(0),
        *logits.shape,
        slots.data_ptr(),
        *(column.data_ptr() for column in asked),
        MIN_TEMPERATURE,
        tokens.data_ptr(),
        faults.data_ptr(),
        address(last),
        address(thresholds and thresholds.value),
        address(thresholds and thresholds.last_id),
    )
