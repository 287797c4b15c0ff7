"""Token bitmasks by our own kernel: a bit is looked at where it is, and only logits of forbidden tokens are written."""

from __future__ import annotations

from torch import Tensor

from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.reference import token_bitmask as reference


def apply_token_bitmask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Arguments as in reference/token_bitmask.py; all but the rows of `logits` are contiguous."""
    kernels, vocab = library(), logits.shape[1]
    assert rows.is_contiguous() and bits.is_contiguous() and bits.shape == (len(rows), -(-vocab // 32))
    if kernels is None or logits.stride(1) != 1 or not kernels.serves(logits):
        reference.apply_token_bitmask(logits, rows, bits)
        return
    kernels(
        "apply_token_bitmask",
        logits.dtype,
        logits.data_ptr(),
        logits.stride(0),
        vocab,
        rows.data_ptr(),
        len(rows),
        bits.data_ptr(),
    )
