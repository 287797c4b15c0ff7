"""Log probabilities of tokens without a softmax of the whole matrix: one read of the rows that ask.

1. `_scan_groups` finds the highest key of each group of a row (see logit_keys.py), the weight of each chunk, and how
   many of its logits are higher than the token's.
2. `_report_logprobs` has a program for each row, which finds the sums, and the k likeliest one after the other. The
   group with the highest key has the next token; only that group is read again for its second highest key. A token
   takes a microsecond, for all rows at once, whatever the vocabulary; a large k is left to torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.logprobs import TokenScores, score
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import fast_launch, next_power_of_2
from quire.compute.kernels.triton.sampling.logit_keys import (
    LOG2_E,
    WEIGHT_SCALE,
    VocabTiling,
    exp_weight,
    key_bits,
    key_to_logit,
    logit_to_key,
    lowest_key,
    rescaled_chunk_masses,
)

MOST = 64
"""The maximum k for which tokens are taken one by one."""
_LOOSE = ["reads", "tokens", "own", "ranks", "ids", "values", "bests", "log_sums"]


def token_logprobs(
    logits: Tensor, reads: Tensor, tokens: Tensor, k: int, *, normalise: bool, shape: VocabTiling | None = None
) -> TokenScores:
    """Rows of logits are contiguous, but may lie apart; `shape` divides them into groups and chunks."""
    n, vocab, device = len(reads), logits.shape[-1], logits.device
    shape = shape or VocabTiling.of(vocab)
    assert logits.stride(1) == 1
    few = k if k <= MOST else 0
    own, best, log_sum = (torch.empty(n, dtype=torch.float32, device=device) for _ in range(3))
    ranks = torch.empty(n, dtype=torch.int64, device=device)
    ids = torch.empty((n, few), dtype=torch.int64, device=device)
    values = torch.empty((n, few), dtype=torch.float32, device=device)
    scores = TokenScores(own, ranks, ids, values, best, log_sum)
    if n:
        ints = torch.empty((n, shape.groups + 2 * shape.chunks), dtype=torch.int32, device=device)
        masses = torch.empty((n, shape.chunks), dtype=torch.int64, device=device)
        overlap = can_overlap(device)
        config = {
            "VOCAB": vocab, "BITS": key_bits(logits.dtype), "WIDTH": ints.shape[1], "GROUP": shape.group,
            "GROUPS": shape.groups, "CHUNKS": shape.chunks, "OVERLAP": overlap, "launch_pdl": overlap, "num_warps": 4,
        }  # fmt: skip
        _scan_groups[(n, shape.chunks)](
            logits, logits.stride(0), reads, tokens, ints, masses, CHUNK=shape.chunk, NORMALISE=normalise, **config
        )
        _report_logprobs[(n,)](
            logits, logits.stride(0), reads, tokens, ints, masses, few, own, ranks, ids, values, best, log_sum,
            GROUPS_2=next_power_of_2(shape.groups), CHUNKS_2=next_power_of_2(shape.chunks),
            NORMALISE=normalise, **config,
        )  # fmt: skip
    if few == k:
        return scores
    top = logits.index_select(0, reads).float().topk(k)
    return scores._replace(ids=top.indices, values=score(top.values, best, log_sum))


@fast_launch
@triton.jit(do_not_specialize_on_alignment=_LOOSE)
def _scan_groups(
    logits, stride, reads, tokens, ints, masses,
    VOCAB: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, NORMALISE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = CHUNK // GROUP
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    at, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = logits + tl.load(reads + at) * stride
    token = logit_to_key(tl.load(row + tl.load(tokens + at)).to(tl.float32), BITS)
    groups = chunk * PER + tl.arange(0, PER)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(row + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    key = tl.where(ids < VOCAB, logit_to_key(x, BITS), lowest_key(BITS))
    best_of = tl.max(key, 1)
    own = ints + at * WIDTH
    tl.store(own + groups, best_of, mask=groups < GROUPS)
    tl.store(own + GROUPS + CHUNKS + chunk, tl.sum(tl.sum((key > token).to(tl.int32), 1), 0))
    if NORMALISE:
        best_key = tl.max(best_of, 0)
        best = key_to_logit(best_key, BITS)
        finite = (best > float("-inf")) & (best < float("inf"))
        weights = exp_weight(tl.where(finite, x, float("-inf")), tl.where(finite, best, 0.0), LOG2_E)
        tl.store(own + GROUPS + chunk, best_key)
        tl.store(masses + at * CHUNKS + chunk, tl.sum(tl.sum(weights, 1), 0))


@fast_launch
@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=_LOOSE)
def _report_logprobs(
    logits, stride, reads, tokens, ints, masses, k, own, ranks, ids, values, bests, log_sums,
    VOCAB: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr, GROUPS_2: tl.constexpr, CHUNKS_2: tl.constexpr, NORMALISE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    at = tl.program_id(0).to(tl.int64)
    row, found = logits + tl.load(reads + at) * stride, ints + at * WIDTH
    group = tl.arange(0, GROUPS_2)
    best_of = tl.load(found + group, mask=group < GROUPS, other=lowest_key(BITS))
    chunk = tl.arange(0, CHUNKS_2)
    higher = tl.sum(tl.load(found + GROUPS + CHUNKS + chunk, mask=chunk < CHUNKS, other=0), 0)
    best, log_sum = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    if NORMALISE:
        best = key_to_logit(tl.max(best_of, 0), BITS)
        mass = rescaled_chunk_masses(found + GROUPS, masses + at * CHUNKS, best, LOG2_E, BITS, CHUNKS, CHUNKS_2)
        log_sum = tl.log2(tl.sum(mass, 0).to(tl.float32) / WEIGHT_SCALE) / LOG2_E
    x = tl.load(row + tl.load(tokens + at)).to(tl.float32)
    tl.store(own + at, (x - best) - log_sum)
    tl.store(ranks + at, (higher + 1).to(tl.int64))
    tl.store(bests + at, best)
    tl.store(log_sums + at, log_sum)
    last_key, last = tl.full((), 0x7FFFFFFF, tl.int32), tl.full((), -1, tl.int32)
    for place in range(k):
        highest = tl.max(best_of, 0)
        chosen = tl.min(tl.where(best_of == highest, group, GROUPS_2), 0)
        near = chosen * GROUP + tl.arange(0, GROUP)
        key = logit_to_key(tl.load(row + near, mask=near < VOCAB, other=float("-inf")).to(tl.float32), BITS)
        left = (near < VOCAB) & ((key < last_key) | ((key == last_key) & (near > last)))  # the others have been taken
        last_key, last = highest, tl.min(tl.where(left & (key == highest), near, VOCAB - 1), 0)
        behind = tl.max(tl.where(left & (near != last), key, lowest_key(BITS)), 0)
        best_of = tl.where(group == chosen, behind, best_of)
        tl.store(ids + at * k + place, last.to(tl.int64))
        tl.store(values + at * k + place, (key_to_logit(highest, BITS) - best) - log_sum)
