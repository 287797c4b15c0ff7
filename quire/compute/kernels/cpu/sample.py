"""Sampling by our own kernel: one pass over a row of logits where it is greedy; and token bitmasks, of which a bit is
looked at where it is, and only logits of forbidden tokens are written.
"""

from __future__ import annotations

from torch import Tensor

from quire.compute.kernels.cpu.library import address, library
from quire.compute.kernels.reference import filters
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
        "sample", logits.dtype, logits.data_ptr(), logits.stride(0), *logits.shape, slots.data_ptr(),
        *(column.data_ptr() for column in asked), MIN_TEMPERATURE, tokens.data_ptr(), faults.data_ptr(), address(last),
        address(thresholds and thresholds.value), address(thresholds and thresholds.last_id),
    )  # fmt: skip


def apply_token_bitmask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Arguments as in reference/filters.py; all but the rows of `logits` are contiguous."""
    kernels, vocab = library(), logits.shape[1]
    assert rows.is_contiguous() and bits.is_contiguous() and bits.shape == (len(rows), -(-vocab // 32))
    if kernels is None or logits.stride(1) != 1 or not kernels.serves(logits):
        filters.apply_token_bitmask(logits, rows, bits)
        return
    kernels(
        "apply_token_bitmask", logits.dtype, logits.data_ptr(), logits.stride(0), vocab, rows.data_ptr(), len(rows),
        bits.data_ptr(),
    )  # fmt: skip
