"""Sampling by our own kernel, in one pass over a row of logits where it is greedy; and token bitmasks.

A bit of a mask is read where the mask lies, and only logits of forbidden tokens are written.
"""

from __future__ import annotations

from torch import Tensor

from quire.compute.kernels.cpu.library import library, library_for_indices
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
    kernels = library_for_indices(slots, *asked, tokens, faults, *(thresholds or ()))
    if kernels is None or logits.stride(1) != 1 or not kernels.serves(logits):
        reference.sample(logits, slots, asked, tokens, faults, last, thresholds)
        return
    out = (tokens, faults, last, *(thresholds or (None, None)))
    kernels("sample", logits.dtype, logits, logits.stride(0), *logits.shape, slots, *asked, MIN_TEMPERATURE, *out)


def apply_token_bitmask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Only the rows of `logits` may lie apart."""
    kernels, vocab = library(), logits.shape[1]
    assert rows.is_contiguous() and bits.is_contiguous() and bits.shape == (len(rows), -(-vocab // 32))
    if kernels is None or logits.stride(1) != 1 or not kernels.serves(logits):
        reference.apply_token_bitmask(logits, rows, bits)
    else:
        kernels("apply_token_bitmask", logits.dtype, logits, logits.stride(0), vocab, rows, len(rows), bits)
