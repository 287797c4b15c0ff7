"""From logits to tokens for all reads of a step in three kernels, which do not depend on which reads are greedy.

1. `_scan_groups` reads each row once and finds the highest key of each group of neighbours (see logit_keys.py) and, for
   rows that need the whole distribution, the weight of each chunk.
2. `_sample_rows` has a program for each row. A greedy row takes the first of the highest logits. A row without filters
   finds the chunk by the chunks' weights, and in it the token. With filters, the few logits above a floor that the
   groups give are gathered in token order; bisecting their keys finds the thresholds of top_k and top_p.
3. `top_k_top_p_search` does so over the whole row, for the few rows with more candidates than can be gathered. For all
   other rows it only costs its launch.

The logits are read once (256 rows of 128,256 in bf16 are 66 MB), and 8 KB of groups a row are written and read. A row
with filters reads another 2% to 50% of itself; a row that is searched is read some ten times, mostly from the L2 cache.

Weights are integers, so a row gives the same token whatever is in the batch. The reference sums in fp64: a token can
only differ where the cumulative probability is within about 1e-6 of the random number, or of top_p, because exp has 22
bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.sample import FINE, NOTHING_LEFT, UNSOUND, SamplingColumns, SamplingThresholds
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import fast_launch, next_power_of_2
from quire.compute.kernels.triton.sampling.logit_keys import (
    KEEP_ALL_TIES,
    LOG2_E,
    LOWEST_TEMPERATURE,
    UNALIGNED_ARGUMENTS,
    VocabTiling,
    bisect_threshold,
    exp_weight,
    key_bits,
    key_to_logit,
    logit_to_key,
    lowest_key,
    min_p_floor,
    num_ties_to_keep,
    philox_number,
    rescaled_chunk_masses,
    target_mass,
    top_p_mass,
)
from quire.compute.kernels.triton.sampling.top_k_top_p_search import top_k_top_p_search

_FINE, _UNSOUND, _NOTHING_LEFT = tl.constexpr(FINE), tl.constexpr(UNSOUND), tl.constexpr(NOTHING_LEFT)


@dataclass(frozen=True)
class SampleConfig:
    """How a draw is divided. Where rounding decides, only the first four fields change what is drawn.

    Attributes:
        shape: The groups and chunks of a row.
        room: The most logits of a row that are gathered, a power of two.
        first, second: How many of the likeliest, or a few more, are gathered at the first and second attempt where only
            top_p cuts. `second` is also the largest top_k for which a row is not searched.
        tile: Logits that are gathered at once.
        block: Logits that the search of a row reads at once.
        scan_warps, pick_warps, search_warps: Warps of each kernel's programs.
    """

    shape: VocabTiling
    room: int = 2_048
    first: int = 128
    second: int = 1_024
    tile: int = 2_048
    block: int = 8_192
    scan_warps: int = 4
    pick_warps: int = 4
    search_warps: int = 16


def sample(
    logits: Tensor,
    slots: Tensor,
    asked: SamplingColumns,
    tokens: Tensor,
    faults: Tensor,
    last: Tensor | None = None,
    thresholds: SamplingThresholds | None = None,
    config: SampleConfig | None = None,
) -> None:
    """Rows of logits are contiguous, but may lie apart."""
    config = config or SampleConfig(VocabTiling.of(logits.shape[-1]))
    (reads, vocab), bits, shape = logits.shape, key_bits(logits.dtype), config.shape
    assert logits.stride(1) == 1
    if not reads:
        return
    width = 2 * shape.groups + shape.chunks + 2 * config.room
    ints = torch.empty((reads, width), dtype=torch.int32, device=logits.device)
    masses = torch.empty((reads, shape.chunks), dtype=torch.int64, device=logits.device)
    overlap = can_overlap(logits.device)
    row = {"VOCAB": vocab, "BITS": bits, "WIDTH": width, "GROUP": shape.group, "GROUPS": shape.groups}
    chunks = {"CHUNK": shape.chunk, "CHUNKS": shape.chunks}
    launch = {"OVERLAP": overlap, "launch_pdl": overlap}
    out = (tokens, faults, last, *(thresholds or (None, None)))
    kept = {
        "ADVANCE": last is not None,
        "WRITE_THRESHOLDS": thresholds is not None,
        "GROUPS_2": next_power_of_2(shape.groups),
    }
    _scan_groups[(reads, shape.chunks)](
        logits, logits.stride(0), slots, asked.temperature, asked.top_k, asked.min_p, ints, masses,
        **row, **chunks, **launch, num_warps=config.scan_warps,
    )  # fmt: skip
    _sample_rows[(reads,)](
        logits, logits.stride(0), slots, *asked, ints, masses, *out,
        **row, **chunks, **kept, **launch, CHUNKS_2=next_power_of_2(shape.chunks), ROOM=config.room,
        TILE=max(1, min(config.room, config.tile) // shape.group), FIRST=min(config.first, shape.groups),
        SECOND=min(config.second, shape.groups), num_warps=config.pick_warps,
    )  # fmt: skip
    top_k_top_p_search[(reads,)](
        logits, logits.stride(0), slots, *asked, ints, *out,
        **row, **kept, **launch, ROOM=config.room, BLOCK=min(config.block, next_power_of_2(vocab)),
        num_warps=config.search_warps,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGUMENTS)
def _scan_groups(
    logits, stride, slots, temperature, top_k, min_p, ints, masses,
    VOCAB: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Find the highest key of each group, and the highest key and weight of each chunk."""
    PER: tl.constexpr = CHUNK // GROUP
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    read, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + read)
    t, k, likely = tl.load(temperature + slot), tl.load(top_k + slot), tl.load(min_p + slot)
    groups = chunk * PER + tl.arange(0, PER)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + read * stride + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    key = tl.where(ids < VOCAB, logit_to_key(x, BITS), lowest_key(BITS))
    best_of = tl.max(key, 1)
    own = ints + read * WIDTH
    tl.store(own + groups, best_of, mask=groups < GROUPS)
    if (t > 0) & ((k <= 0) | (k >= VOCAB)) & (likely <= 0):
        best_key = tl.max(best_of, 0)
        best, scale = key_to_logit(best_key, BITS), LOG2_E / tl.maximum(t, LOWEST_TEMPERATURE)
        finite = (best > float("-inf")) & (best < float("inf"))
        weights = exp_weight(tl.where(finite, x, float("-inf")), tl.where(finite, best, 0.0), scale)
        tl.store(own + 2 * GROUPS + chunk, best_key)
        tl.store(masses + read * CHUNKS + chunk, tl.sum(tl.sum(weights, 1), 0))


@fast_launch
@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGUMENTS)
def _sample_rows(
    logits, stride, slots, temperature, top_k, top_p, min_p, seed, drawn, ints, masses,
    tokens, faults, last, threshold_value, threshold_last_id,
    VOCAB: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUPS_2: tl.constexpr, CHUNKS_2: tl.constexpr, ROOM: tl.constexpr,
    TILE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, ADVANCE: tl.constexpr,
    WRITE_THRESHOLDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Find the token of each row, or -1 where the whole row must be searched."""
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    read = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + read)
    t = tl.load(temperature + slot)
    row, own = logits + read * stride, ints + read * WIDTH
    at = tl.arange(0, GROUPS_2)
    best_of = tl.load(own + at, mask=at < GROUPS, other=lowest_key(BITS))
    best_key = tl.max(best_of, 0)
    best = key_to_logit(best_key, BITS)
    fault = tl.where(best == float("-inf"), _NOTHING_LEFT, tl.where(best < float("inf"), _FINE, _UNSOUND))
    token = tl.full((), -1, tl.int32)
    threshold, end = tl.full((), lowest_key(BITS), tl.int64), tl.full((), KEEP_ALL_TIES, tl.int64)
    if (t <= 0) | (fault != 0):
        group = tl.min(tl.where(best_of == best_key, at, GROUPS_2), 0)
        ids = group * GROUP + tl.arange(0, GROUP)
        x = tl.load(row + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
        token = tl.min(tl.where((ids < VOCAB) & (logit_to_key(x, BITS) == best_key), ids, VOCAB - 1), 0)
    else:
        k, p, likely = tl.load(top_k + slot), tl.load(top_p + slot), tl.load(min_p + slot)
        scale = LOG2_E / tl.maximum(t, LOWEST_TEMPERATURE)
        number = philox_number(tl.load(seed + slot), tl.load(drawn + slot))
        floor = min_p_floor(best, scale, likely, BITS, WRITE_THRESHOLDS)
        some = (k > 0) & (k < VOCAB)
        chunk_masses = tl.zeros((CHUNKS_2,), tl.int64)
        if (not some) & (likely <= 0):
            chunk_masses = rescaled_chunk_masses(
                own + 2 * GROUPS, masses + read * CHUNKS, best, scale, BITS, CHUNKS, CHUNKS_2
            )
        if (not some) & (likely <= 0) & (p >= 1):
            token = _sample_unfiltered(
                row, own + 2 * GROUPS, masses + read * CHUNKS, chunk_masses, best, scale, number,
                VOCAB, BITS, CHUNK, CHUNKS_2,
            )  # fmt: skip
        else:
            all_mass = tl.sum(chunk_masses, 0)
            # How many of the likeliest must be among the gathered; 0 for all that min_p leaves.
            look = tl.where(some, tl.where(k <= SECOND, k, 0), tl.where(likely > 0, 0, FIRST)).to(tl.int32)
            widest = tl.where(some | (likely > 0), look, SECOND)
            turns = tl.where(look < widest, 2, 1)
            lowest = tl.min(tl.where(at < GROUPS, best_of, best_key), 0)
            while (token < 0) & (turns > 0):
                ground = floor
                if look > 0:
                    ground = bisect_threshold(best_of, tl.full((GROUPS_2,), 1, tl.int32), lowest.to(tl.int64),
                                     best_key.to(tl.int64), tl.full((), 0, tl.int32), look)  # fmt: skip
                    ground = tl.maximum(ground, floor)
                count = _gather_candidates(
                    row, own, best_of >= ground.to(tl.int32), ground.to(tl.int32),
                    VOCAB, BITS, GROUP, GROUPS, CHUNKS, ROOM, TILE,
                )  # fmt: skip
                if count <= ROOM:
                    token, threshold, end = _sample_gathered(
                        own + 2 * GROUPS + CHUNKS, count, ground, best_key, best, scale, tl.where(some, k, 0), p,
                        all_mass, some | (ground == floor), number, VOCAB, BITS, ROOM,
                    )  # fmt: skip
                look = widest
                turns = tl.where(count <= ROOM, turns - 1, 0)
    tl.store(tokens + read, token.to(tl.int64))
    tl.store(faults + read, fault.to(tl.int8))
    if WRITE_THRESHOLDS:
        tl.store(
            threshold_value + read,
            tl.where(threshold == lowest_key(BITS), float("-inf"), key_to_logit(threshold.to(tl.int32), BITS)),
        )
        tl.store(threshold_last_id + read, end)
    if ADVANCE and token >= 0:
        tl.store(last + slot, token.to(tl.int64))
        tl.store(drawn + slot, tl.load(drawn + slot) + 1)


@triton.jit
def _sample_unfiltered(
    row, bests, masses, scaled, best, scale, number,
    VOCAB: tl.constexpr, BITS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS_2: tl.constexpr,
):  # fmt: skip
    sums = tl.cumsum(scaled, 0)
    target = target_mass(number, tl.sum(scaled, 0))
    chunk = tl.sum((sums <= target).to(tl.int32), 0)
    before = tl.sum(tl.where(tl.arange(0, CHUNKS_2) < chunk, scaled, 0), 0)
    own, mass = key_to_logit(tl.load(bests + chunk), BITS), tl.load(masses + chunk)
    share = (target - before).to(tl.float64) / tl.exp2((own - best) * scale).to(tl.float64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(row + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    inside = tl.cumsum(exp_weight(x, own, scale), 0) <= tl.minimum(share.to(tl.int64), mass - 1)
    return chunk * CHUNK + tl.sum(inside.to(tl.int32), 0)


@triton.jit
def _gather_candidates(
    row, own, chosen, ground,
    VOCAB: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, CHUNKS: tl.constexpr,
    ROOM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gather keys from `ground` on and their ids in token order; return how many, or more than ROOM if too many.

    `chosen` [groups] says which groups have such keys.
    """
    listed, keys = own + GROUPS, own + 2 * GROUPS + CHUNKS
    entry = tl.cumsum(chosen.to(tl.int32), 0) - 1
    groups = tl.sum(chosen.to(tl.int32), 0)
    tl.debug_barrier()  # what an earlier look has listed is no longer read
    tl.store(listed + entry, tl.arange(0, chosen.shape[0]), mask=chosen)
    tl.debug_barrier()
    count, first = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while (first < groups) & (count <= ROOM):
        at = first + tl.arange(0, TILE)
        group = tl.load(listed + at, mask=at < groups, other=GROUPS)
        ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(row + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
        key = logit_to_key(x, BITS)
        found = (ids < VOCAB) & (key >= ground)
        each = tl.sum(found.to(tl.int32), 1)
        place = count + (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(found.to(tl.int32), 1) - 1
        tl.store(keys + place, key, mask=found & (place < ROOM))
        tl.store(keys + ROOM + place, ids, mask=found & (place < ROOM))
        count += tl.sum(each, 0)
        first += TILE
    tl.debug_barrier()
    return count


@triton.jit
def _sample_gathered(
    found, count, ground, best_key, best, scale, k, p, all_mass, complete, number,
    VOCAB: tl.constexpr, BITS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Return the token of a row whose `count` likeliest are gathered, and the threshold of top_k and top_p.

    Where `complete`, top_k cuts what was not gathered, or it has no weight. Otherwise the row's weight is `all_mass`,
    and the token is -1 where top_p reaches beyond what was gathered.
    """
    at = tl.arange(0, ROOM)
    inside = at < count
    key = tl.load(found + at, mask=inside, other=lowest_key(BITS))
    ids = tl.load(found + ROOM + at, mask=inside, other=0)
    weight = exp_weight(tl.where(inside, key_to_logit(key, BITS), float("-inf")), best, scale)
    threshold, end, high = ground, tl.full((), KEEP_ALL_TIES, tl.int64), best_key.to(tl.int64)
    if (k > 0) & (k < count):
        threshold = bisect_threshold(
            key, tl.full((ROOM,), 1, tl.int32), threshold, high, tl.full((), 0, tl.int32), k.to(tl.int32)
        )
        room = k - tl.sum((key > threshold.to(tl.int32)).to(tl.int64), 0)
        end = _last_tie_to_keep(key, ids, inside, threshold.to(tl.int32), room)
        stays = (key > threshold.to(tl.int32)) | ((key == threshold.to(tl.int32)) & (ids <= end))
        weight, inside = tl.where(stays, weight, 0), inside & stays
    mass = tl.sum(weight, 0)
    aim = top_p_mass(p, tl.where(complete, mass, all_mass))
    token = tl.full((), -1, tl.int32)
    if (p >= 1) | (mass >= aim):
        if p < 1:
            threshold = bisect_threshold(
                tl.where(inside, key, lowest_key(BITS)), weight, threshold, high, tl.full((), 0, tl.int64), aim
            )
            above = tl.sum(tl.where(key > threshold.to(tl.int32), weight, 0), 0)
            room = num_ties_to_keep(aim - above, exp_weight(key_to_logit(threshold.to(tl.int32), BITS), best, scale))
            end = _last_tie_to_keep(key, ids, inside, threshold.to(tl.int32), room)
            stays = (key > threshold.to(tl.int32)) | ((key == threshold.to(tl.int32)) & (ids <= end))
            weight = tl.where(stays, weight, 0)
        target = target_mass(number, tl.sum(weight, 0))
        place = tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
        token = tl.sum(tl.where(at == place, ids, 0), 0)
    return token, threshold, end


@triton.jit
def _last_tie_to_keep(key, ids, inside, threshold, room):
    """Return the id of the last of the first `room` keys that equal `threshold`."""
    equal = inside & (key == threshold)
    stays = equal & (tl.cumsum(equal.to(tl.int32), 0) <= room)
    return tl.max(tl.where(stays, ids, -1), 0).to(tl.int64)
