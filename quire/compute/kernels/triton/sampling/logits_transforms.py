"""Penalties and token bitmasks, which change logits before a draw: a program takes a chunk of one read's logits.

Penalties read 4 bytes for each token of the vocabulary, and move 8 more for each logit that they change: 256 reads of
128,256 read 131 MB. Each word of a bitmask is read once from the host's pinned memory, at the speed of PCIe (64 masks
of 131,072 tokens are 1 MB, some 20 µs); only the logits of forbidden tokens are written, and none are read."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.penalties import ONE_MORE
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, next_power_of_2

_CHUNK = 4_096
_READS = 128
_WORDS = 128
"""Words of a bitmask that a program reads."""
_WORD_BITS = tl.constexpr(32)
_ONE_MORE = tl.constexpr(ONE_MORE)


def apply_penalties(logits: Tensor, reads: Tensor, rows: Tensor, seen: Tensor, weights: Tensor) -> None:
    """Only the rows of `logits` may lie apart."""
    vocab = logits.shape[1]
    assert logits.stride(1) == 1 and seen.is_contiguous() and weights.is_contiguous()
    if not len(reads):
        return
    chunk, overlap = min(_CHUNK, next_power_of_2(vocab)), can_overlap(logits.device)
    _apply_penalties[(len(reads), cdiv(vocab, chunk))](
        logits, logits.stride(0), reads, rows, seen, weights,
        VOCAB=vocab, CHUNK=chunk, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip


def count_sampled(tokens: Tensor, reads: Tensor, rows: Tensor, seen: Tensor) -> None:
    assert seen.is_contiguous()
    if not len(reads):
        return
    overlap = can_overlap(seen.device)
    _count_sampled[(cdiv(len(reads), _READS),)](
        tokens, reads, rows, len(reads), seen,
        VOCAB=seen.shape[1], BLOCK=_READS, OVERLAP=overlap, num_warps=1, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["reads", "rows"])
def _apply_penalties(
    logits, stride, reads, rows, seen, weights, VOCAB: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    at = tl.program_id(0)
    read, row = tl.load(reads + at), tl.load(rows + at)
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    own = tl.load(seen + row * VOCAB + ids, mask=ids < VOCAB, other=0)
    weights += 3 * row
    presence, frequency, repetition = tl.load(weights), tl.load(weights + 1), tl.load(weights + 2)
    place = logits + read * stride + ids
    x = tl.load(place, mask=own > 0, other=0.0)
    count = own >> 1
    x = tl.where(x > 0, x / repetition, x * repetition)
    x -= frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0)
    tl.store(place, x, mask=own > 0)


@fast_launch
@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["tokens", "reads", "rows"])
def _count_sampled(tokens, reads, rows, n, seen, VOCAB: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    row, read = tl.load(rows + at, mask=here, other=0), tl.load(reads + at, mask=here, other=0)
    place = seen + row * VOCAB + tl.load(tokens + read, mask=here, other=0)
    tl.store(place, tl.load(place, mask=here, other=0) + _ONE_MORE, mask=here)


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
