"""top_k, top_p and the draw for a row with more candidates than can be gathered, which is read some ten times.

The thresholds of top_k and top_p are bisected until what lies between the bounds can be gathered. A row has one
program, because such rows are few: a flat distribution under top_p or min_p, or a top_k of thousands.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.compute.kernels.triton.launching.dependent_launch import release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import fast_launch
from quire.compute.kernels.triton.sampling.logit_keys import (
    KEEP_ALL_TIES,
    LOG2_E,
    LOWEST_TEMPERATURE,
    UNALIGNED_ARGUMENTS,
    ZERO_WEIGHT_LOG2,
    bisect_threshold,
    exp_weight,
    key_to_logit,
    logit_to_key,
    lowest_key,
    min_p_floor,
    num_ties_to_keep,
    philox_number,
    target_mass,
    top_p_mass,
)


@fast_launch
@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGUMENTS)
def top_k_top_p_search(
    logits, stride, slots, temperature, top_k, top_p, min_p, seed, drawn, ints,
    tokens, faults, last, threshold_value, threshold_last_id,
    VOCAB: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_2: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr, ADVANCE: tl.constexpr,
    WRITE_THRESHOLDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Find the token of each row that has none yet, over the whole row."""
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    read = tl.program_id(0).to(tl.int64)
    if tl.load(tokens + read) < 0:
        slot = tl.load(slots + read)
        t, k = tl.load(temperature + slot), tl.load(top_k + slot)
        p, likely = tl.load(top_p + slot), tl.load(min_p + slot)
        row, own = logits + read * stride, ints + read * WIDTH
        at = tl.arange(0, GROUPS_2)
        best_key = tl.max(tl.load(own + at, mask=at < GROUPS, other=lowest_key(BITS)), 0).to(tl.int64)
        best, scale = key_to_logit(best_key.to(tl.int32), BITS), LOG2_E / tl.maximum(t, LOWEST_TEMPERATURE)
        threshold, room = min_p_floor(best, scale, likely, BITS, WRITE_THRESHOLDS), tl.full((), KEEP_ALL_TIES, tl.int64)
        for stage in range(2):  # top_k, then top_p; one loop, so that its code is there once
            by_weight = stage == 1
            if tl.where(by_weight, p < 1, (k > 0) & (k < VOCAB)):
                whole = room == KEEP_ALL_TIES
                count, mass = _mass_above(
                    row, tl.where(whole, threshold - 1, threshold), best, scale, VOCAB, BITS, BLOCK
                )
                mass += tl.where(whole, 0, room * exp_weight(key_to_logit(threshold.to(tl.int32), BITS), best, scale))
                if by_weight | (k < count):
                    aim = tl.where(by_weight, top_p_mass(p, mass), k)
                    found, above = _bisect_row_threshold(
                        row, own + GROUPS, threshold, best_key, count + tl.where(whole, 0, VOCAB), aim, best, scale,
                        by_weight, VOCAB, BITS, ROOM, BLOCK,
                    )  # fmt: skip
                    weight = exp_weight(key_to_logit(found.to(tl.int32), BITS), best, scale)
                    threshold, room = found, num_ties_to_keep(aim - above, tl.where(by_weight, weight, 1))
        total, end = _sum_kept_mass(row, threshold, room, best, scale, VOCAB, BITS, BLOCK)
        target = target_mass(philox_number(tl.load(seed + slot), tl.load(drawn + slot)), total)
        token = _token_at_mass(row, threshold, end, target, best, scale, VOCAB, BITS, BLOCK)
        tl.store(tokens + read, token.to(tl.int64))
        if WRITE_THRESHOLDS:
            tl.store(threshold_value + read, key_to_logit(threshold.to(tl.int32), BITS))
            tl.store(threshold_last_id + read, tl.where(room == KEEP_ALL_TIES, room, end))
        if ADVANCE:
            tl.store(last + slot, token.to(tl.int64))
            tl.store(drawn + slot, tl.load(drawn + slot) + 1)


@triton.jit
def _block(row, start, best, scale, VOCAB: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return ids, whether there are such tokens, keys and weights of a block of the row."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(row + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    return ids, ids < VOCAB, logit_to_key(x, BITS), exp_weight(x, best, scale)


@triton.jit
def _mass_above(row, threshold, best, scale, VOCAB: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many keys lie above `threshold`, and their weight; int64."""
    count, mass = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int64)
    for start in range(0, VOCAB, BLOCK):
        _, inside, key, weight = _block(row, start, best, scale, VOCAB, BITS, BLOCK)
        above = inside & (key > threshold)
        count += above.to(tl.int32)
        mass += tl.where(above, weight, 0)
    return tl.sum(count, 0).to(tl.int64), tl.sum(mass, 0)


@triton.jit
def _bisect_row_threshold(
    row, found, low, high, count, aim, best, scale, by_weight,
    VOCAB: tl.constexpr, BITS: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute `bisect_threshold` over the whole row, by weight or by number; also return what lies above the threshold.

    `count` is at least the number of keys from `low` on. Every other middle is the middle of two values, because with a
    few numbers far from 0 and one close to it, most keys are those of tiny numbers. Once the keys between the bounds
    have room, they are gathered.
    """
    # Nothing without weight is looked at, or the middle of two values could be any.
    low = tl.where(by_weight, tl.maximum(low, logit_to_key(best - ZERO_WEIGHT_LOG2 / scale, BITS).to(tl.int64)), low)
    base, count_above = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    turn = tl.full((), 0, tl.int32)
    while (low < high) & (count - count_above > ROOM):
        middle = 0.5 * key_to_logit(low.to(tl.int32), BITS) + 0.5 * key_to_logit(high.to(tl.int32), BITS)
        middle_key = tl.where(turn % 2 == 0, logit_to_key(middle, BITS).to(tl.int64), low + ((high - low) >> 1))
        middle_key = tl.minimum(tl.maximum(middle_key, low), high - 1)
        number, mass = _mass_above(row, middle_key, best, scale, VOCAB, BITS, BLOCK)
        units = tl.where(by_weight, mass, number)
        less = units < aim
        low, high = tl.where(less, low, middle_key + 1), tl.where(less, middle_key, high)
        count, count_above = tl.where(less, count, number), tl.where(less, number, count_above)
        base = tl.where(less, units, base)
        turn += 1
    if low < high:
        number = tl.full((), 0, tl.int32)
        tl.debug_barrier()  # what was gathered before is no longer read
        for start in range(0, VOCAB, BLOCK):
            _, inside, key, _ = _block(row, start, best, scale, VOCAB, BITS, BLOCK)
            here = inside & (key >= low) & (key <= high)
            tl.store(found + number + tl.cumsum(here.to(tl.int32), 0) - 1, key, mask=here)
            number += tl.sum(here.to(tl.int32), 0)
        tl.debug_barrier()
        at = tl.arange(0, ROOM)
        key = tl.load(found + at, mask=at < number, other=lowest_key(BITS))
        weight = exp_weight(tl.where(at < number, key_to_logit(key, BITS), float("-inf")), best, scale)
        units = tl.where(by_weight, weight, (at < number).to(tl.int64))
        high = bisect_threshold(key, units, low, high, base, aim)
        base += tl.sum(tl.where(key > high, units, 0), 0)
    return high, base


@triton.jit
def _sum_kept_mass(row, threshold, room, best, scale, VOCAB: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the weight of tokens above the threshold and of the first `room` on it, and the last id of the latter."""
    mass, equals, end = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), tl.full((), -1, tl.int64)
    for start in range(0, VOCAB, BLOCK):
        ids, inside, key, weight = _block(row, start, best, scale, VOCAB, BITS, BLOCK)
        equal = inside & (key == threshold)
        stays = equal & (equals + tl.cumsum(equal.to(tl.int32), 0) <= room)
        mass += tl.sum(tl.where(stays | (inside & (key > threshold)), weight, 0), 0)
        end = tl.maximum(end, tl.max(tl.where(stays, ids, -1), 0).to(tl.int64))
        equals += tl.sum(equal.to(tl.int64), 0)
    return mass, end


@triton.jit
def _token_at_mass(
    row, threshold, end, target, best, scale, VOCAB: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the first token at which the weights of the tokens that stay exceed `target`."""
    before, start, token = tl.full((), 0, tl.int64), tl.full((), 0, tl.int32), tl.full((), -1, tl.int32)
    while (token < 0) & (start < VOCAB):
        ids, inside, key, weight = _block(row, start, best, scale, VOCAB, BITS, BLOCK)
        stays = inside & ((key > threshold) | ((key == threshold) & (ids <= end)))
        weight = tl.where(stays, weight, 0)
        mass = tl.sum(weight, 0)
        if before + mass > target:
            token = start + tl.sum((before + tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
        before += mass
        start += BLOCK
    return token
