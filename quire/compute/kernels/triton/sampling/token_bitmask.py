"""Token bitmasks: a program takes a chunk of one read's logits.

Each word of a bitmask is read once from the host's pinned memory, at the speed of PCIe (64 masks of 131,072 tokens are
1 MB, some 20 µs). Only the logits of forbidden tokens are written, and none are read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch

_WORDS = 128
"""Words of a program."""
_WORD_BITS = tl.constexpr(32)


def apply_token_bitmask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Only the rows of `logits` may lie apart."""
    vocab = logits.shape[1]
    assert logits.stride(1) == 1 and bits.is_contiguous() and bits.shape[1] == cdiv(vocab, 32)
    if not len(rows):
        return
    overlap = can_overlap(logits.device)
    _apply_token_bitmask[(len(rows), cdiv(bits.shape[1], _WORDS))](
        logits, logits.stride(0), rows, bits,
        VOCAB=vocab, WORDS=_WORDS, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["rows"])
def _apply_token_bitmask(logits, stride, rows, bits, VOCAB: tl.constexpr, WORDS: tl.constexpr, OVERLAP: tl.constexpr):
    WIDTH: tl.constexpr = (VOCAB + _WORD_BITS - 1) // _WORD_BITS
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    at = tl.program_id(0).to(tl.int64)
    word, place = tl.program_id(1) * WORDS + tl.arange(0, WORDS), tl.arange(0, _WORD_BITS)
    allowed = tl.load(bits + at * WIDTH + word, mask=word < WIDTH, other=0, cache_modifier=".cv")
    row = logits + tl.load(rows + at) * stride
    ids = word[:, None] * _WORD_BITS + place[None, :]
    forbidden = ((allowed[:, None] >> place[None, :]) & 1) == 0
    tl.store(row + ids, float("-inf"), mask=forbidden & (ids < VOCAB))
