"""Norms, rotates and stores queries, keys and values after their projection, in one pass.

A program takes one token and a few of its heads, reads them once, and writes queries to their tensor, keys and values
to the cache. So a token costs 2 · (heads + 2 · kv_heads) · d elements of traffic; its angles and the norm's weight stay
in the cache. For few tokens, the program also adds the low-rank update of the token's adapter, whose B it reads while
the projection ends.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.attention_inputs import CacheWrite, QKNormRope
from quire.compute.kernels.reference.lora import lies_beside
from quire.compute.kernels.reference.quantized_rows import LARGEST
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import fast_launch
from quire.compute.kernels.triton.lora import lora_expand

_CONFIGS = ((32, 2, 1), (64, 4, 1))
"""(maximum tokens, heads of a program, warps): with few tokens, several programs share the work of one token."""
_ELEMENTS_OF_MANY, _MOST_OF_MANY, _WARPS_OF_MANY = 4096, 32, 4
"""With many tokens, the elements of a program, the most heads they make, and its warps: 8,192 tokens with 16 query and
16 key and value heads of 128 take 37 µs on an NVIDIA H200, where 8 heads a program took 43."""
_MAX_UPDATED, _CONFIG_OF_UPDATED = 64, (2, 2)
"""The maximum number of tokens with an update, and their config.

With more tokens, those that share an adapter read it less often in tiles. Heads are few, because a program keeps what
it reads of B in registers.
"""
_BLOCK_R = 16


def qk_norm_rope_and_cache(qkv: Tensor, norm_rope: QKNormRope, write: CacheWrite, q: Tensor) -> None:
    """Implement reference/rowwise_attention.py's `qk_norm_rope_and_cache`.

    Tokens of qkv may lie apart; all other tensors are contiguous.
    """
    norm, eps, cos, sin, update, form, bias, mean_squares, query_scale = norm_rope
    (keys, values, scales), slot_mapping = write
    tokens, heads, d = q.shape
    kv_heads = keys.shape[2]
    assert qkv.stride()[1:] == (d, 1)
    assert keys.is_contiguous() and values.is_contiguous() and slot_mapping.is_contiguous() and q.is_contiguous()
    assert all(t is None or t.is_contiguous() for t in (norm, cos, sin, bias, mean_squares, query_scale))
    assert form.values == "projected" or (norm is not None and mean_squares is None and not form.centered)
    if not tokens:
        return
    half, all_heads = 0 if cos is None else cos.shape[-1], heads + (1 if values is keys else 2) * kv_heads
    if not form.stores:
        all_heads = heads
    overlap = can_overlap(qkv.device)
    tile, warps = next((config for most, *config in _CONFIGS if tokens <= most), _config_of_many(d))
    if update is not None and (tokens > _MAX_UPDATED or not form.stores or form.values == "keys"):
        lora_expand(*update, qkv.view(len(qkv), -1))
        update = None
    low = slot_of_row = b = ranks = factors = summands = scaled = None
    b_stride = ranks_stride = 0
    rank = modules = 1
    if update is not None:
        tile, warps = _CONFIG_OF_UPDATED
        low, weights, (_, _, slot_of_row) = update
        b, ranks, (factors, summands, scaled) = weights.b, weights.ranks, weights.scaling or (None, None, None)
        assert weights.scaling is None or lies_beside(weights.scaling, weights)
        b_stride, ranks_stride = b.stride(0), ranks.stride(0)
        rank, modules = b.shape[2], len(weights.rows)
        assert slot_of_row is not None and modules in (1, 3)
    _qk_norm_rope_and_cache[(tokens, -(-all_heads // tile))](
        qkv, norm, bias, mean_squares, query_scale, cos, sin, keys, values, slot_mapping, q, scales,
        low, slot_of_row, b, ranks, factors, summands, scaled, b_stride, ranks_stride, qkv.stride(0), eps,
        form.clip or 0.0,
        MOST=LARGEST.get(keys.dtype, 0.0), HEADS=heads, KV_HEADS=kv_heads, ALL=all_heads, D=d, HALF=half,
        HALF_BLOCK=_block(half), REST_BLOCK=_block(d - 2 * half), RANK=rank, MODULES=modules, BLOCK_R=_BLOCK_R,
        TILE=tile, CLIPPED=form.clip is not None, CENTERED=form.centered, NORM_LAST=form.norm_last,
        INTERLEAVED=form.interleaved, UNIT_VALUES=form.values != "projected", VALUES_OF_KEYS=form.values == "keys",
        OVERLAP=overlap, num_warps=warps, launch_pdl=overlap,
    )  # fmt: skip


def qk_mean_squares(qkv: Tensor, heads: int, kv_heads: int, parts: int, out: Tensor) -> None:
    """Implement reference/rowwise_attention.py's `qk_mean_squares`; tokens of qkv may lie apart."""
    tokens, _, d = qkv.shape
    assert qkv.stride()[1:] == (d, 1) and out.is_contiguous()
    if not tokens:
        return
    overlap = can_overlap(qkv.device)
    _qk_mean_squares[(tokens, 2)](
        qkv, out, qkv.stride(0), 1.0 / (heads * d * parts), 1.0 / (kv_heads * d * parts),
        QUERIES=heads * d, KEYS=kv_heads * d, BLOCK=1024, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip


def _config_of_many(d: int) -> tuple[int, int]:
    """Return the heads and warps of a program where there are many tokens; heads are d wide."""
    return min(_MOST_OF_MANY, _ELEMENTS_OF_MANY // _block(d)), _WARPS_OF_MANY


def _block(n: int) -> int:
    """Return a power of two that is at least n; n may be 0."""
    return 1 << max(0, n - 1).bit_length()


@fast_launch
@triton.jit(
    do_not_specialize_on_alignment=[
        "slot_mapping",
        "slot_of_row",
        "ranks",
        "ranks_stride",
        "factors",
        "summands",
        "scaled",
    ]
)
def _qk_norm_rope_and_cache(
    qkv, norm, bias, mean_squares, query_scale, cos, sin, keys, values, slot_mapping, q, scales,
    low, slot_of_row, b, ranks, factors, summands, scaled, b_stride, ranks_stride, qkv_token, eps, clip,
    MOST: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ALL: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, RANK: tl.constexpr, MODULES: tl.constexpr,
    BLOCK_R: tl.constexpr, TILE: tl.constexpr, CLIPPED: tl.constexpr, CENTERED: tl.constexpr,
    NORM_LAST: tl.constexpr, INTERLEAVED: tl.constexpr, UNIT_VALUES: tl.constexpr, VALUES_OF_KEYS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Process some heads of a token, each in three parts: HALF dimensions, the HALF that rotate with them, and the
    rest.

    The rest is only normed.
    """
    SCALED: tl.constexpr = query_scale is not None
    release_dependents(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = head < ALL  # without values, where keys are values too
    changes = head < HEADS + KV_HEADS
    turning, resting = tl.arange(0, HALF_BLOCK), tl.arange(0, REST_BLOCK)
    turns = inside[:, None] & (turning < HALF)[None, :]
    rests = inside[:, None] & (resting < D - 2 * HALF)[None, :]
    own = (head * D)[:, None]
    if INTERLEAVED:
        firsts, seconds = 2 * turning, 2 * turning + 1
    else:
        firsts, seconds = turning, turning + HALF
    if low is not None:
        slot = tl.load(slot_of_row + token)
        used = tl.load(ranks + (slot - 1) * ranks_stride, slot != 0, 0)
        changed = head < tl.where(used != 0, HEADS + 2 * KV_HEADS, 0)
        b += (slot - 1) * b_stride + (head * D * RANK)[:, None, None] + tl.arange(0, BLOCK_R)[None, None, :]
        rescaled = 0
        if scaled is not None:
            rescaled = tl.load(scaled + (slot - 1) * ranks_stride, slot != 0, 0)
            factors += (slot - 1) * b_stride + own
            summands += (slot - 1) * b_stride + own
        if HALF > 0:
            first_b = _of_b(b, firsts, changed[:, None] & (turning < HALF)[None, :], RANK)
            second_b = _of_b(b, seconds, changed[:, None] & (turning < HALF)[None, :], RANK)
        if D > 2 * HALF:
            rest_b = _of_b(b, resting + 2 * HALF, changed[:, None] & (resting < D - 2 * HALF)[None, :], RANK)
    wait_for_inputs(OVERLAP)
    row = qkv + token * qkv_token + own
    if VALUES_OF_KEYS:
        row -= tl.where(head >= HEADS + KV_HEADS, KV_HEADS * D, 0)[:, None]
    if HALF > 0:
        first = tl.load(row + firsts[None, :], turns, 0.0)
        second = tl.load(row + seconds[None, :], turns, 0.0)
    if D > 2 * HALF:
        rest = tl.load(row + 2 * HALF + resting[None, :], rests, 0.0)
    # A part without dimensions stands for another one, because Triton 3.6 returns no None from a function.
    if HALF == 0:
        first, second = rest, rest
    if D == 2 * HALF:
        rest = first
    cache_slot = tl.load(slot_mapping + token)
    if HALF > 0:
        angle = token * HALF + turning[None, :] + tl.zeros((TILE, 1), tl.int32)  # every head's own load: no exchange
        c = tl.load(cos + angle, turns, 0.0)
        s = tl.load(sin + angle, turns, 0.0)
    if low is not None:
        module = (head >= HEADS).to(tl.int32) + (head >= HEADS + KV_HEADS).to(tl.int32)
        its_low = low + token * (MODULES * RANK) + (module * (MODULES // 3) * RANK)[:, None]
        its_low += tl.arange(0, BLOCK_R)[None, :]
        first_low = tl.load(its_low, (tl.arange(0, BLOCK_R) < tl.where(used != 0, BLOCK_R, 0))[None, :], 0.0)
        # All is asked for by now; see lora.py.
        if HALF > 0:
            first_sums, second_sums = first.to(tl.float32), second.to(tl.float32)
        if D > 2 * HALF:
            rest_sums = rest.to(tl.float32)
        if used != 0:
            if HALF > 0:
                first_sums = _updated(
                    first_sums, first_b, b, first_low, its_low, factors, summands, rescaled, firsts, used, turns,
                    RANK, BLOCK_R,
                )  # fmt: skip
                second_sums = _updated(
                    second_sums, second_b, b, first_low, its_low, factors, summands, rescaled, seconds, used,
                    turns, RANK, BLOCK_R,
                )  # fmt: skip
            if D > 2 * HALF:
                rest_sums = _updated(
                    rest_sums, rest_b, b, first_low, its_low, factors, summands, rescaled, resting + 2 * HALF, used,
                    rests, RANK, BLOCK_R,
                )  # fmt: skip
        if HALF > 0:
            first, second = first_sums.to(first.dtype), second_sums.to(second.dtype)
        if D > 2 * HALF:
            rest = rest_sums.to(rest.dtype)
    if CLIPPED:
        if HALF > 0:
            first, second = _clipped(first, clip), _clipped(second, clip)
        if D > 2 * HALF:
            rest = _clipped(rest, clip)
    if norm is not None and not NORM_LAST:
        first, second, rest = _normed_parts(
            first, second, rest, norm, bias, mean_squares, own, token, head, firsts, seconds, resting, turns, rests,
            changes, eps, HEADS, D, HALF, CENTERED, UNIT_VALUES,
        )  # fmt: skip
    if HALF > 0:
        c, s = c.to(tl.float32), s.to(tl.float32)
        x, y = first.to(tl.float32), second.to(tl.float32)
        first = tl.where(changes[:, None], (x * c - y * s).to(first.dtype), first)
        second = tl.where(changes[:, None], (y * c + x * s).to(second.dtype), second)
    if norm is not None and NORM_LAST:
        first, second, rest = _normed_parts(
            first, second, rest, norm, bias, mean_squares, own, token, head, firsts, seconds, resting, turns, rests,
            changes, eps, HEADS, D, HALF, CENTERED, UNIT_VALUES,
        )  # fmt: skip
    if SCALED:
        factor = tl.where(head < HEADS, tl.load(query_scale + token), 1.0)[:, None]
        if HALF > 0:
            first = (first.to(tl.float32) * factor).to(first.dtype)
            second = (second.to(tl.float32) * factor).to(second.dtype)
        if D > 2 * HALF:
            rest = (rest.to(tl.float32) * factor).to(rest.dtype)
    if HALF > 0:
        _store(first, q, keys, values, scales, token, cache_slot, head, firsts, turns, MOST, HEADS, KV_HEADS, D)
        _store(second, q, keys, values, scales, token, cache_slot, head, seconds, turns, MOST, HEADS, KV_HEADS, D)
    if D > 2 * HALF:
        _store(
            rest, q, keys, values, scales, token, cache_slot, head, resting + 2 * HALF, rests, MOST, HEADS, KV_HEADS, D
        )


@triton.jit
def _of_b(b, column, mask, RANK: tl.constexpr):
    """Return B [heads, columns, ranks]; b has pointers to each head's first column."""
    return tl.load(b + (column * RANK)[None, :, None], mask[:, :, None], 0.0)


@triton.jit
def _updated(
    sums, first_b, b, first_low, low, factors, summands, rescaled, column, used, mask,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return sums [heads, columns], scaled by the adapter's magnitudes, plus B A x.

    `first_b` and `first_low` are the first ranks of B and of A x, and low [heads, ranks] points to A x; factors is None
    where no adapter has magnitudes.
    """
    if factors is not None:  # noqa: SIM102 (decided when it is compiled)
        if rescaled != 0:
            factor = tl.load(factors + column[None, :], mask, 0.0).to(tl.float32)
            sums += sums * factor + tl.load(summands + column[None, :], mask, 0.0).to(tl.float32)
    update = tl.sum(first_b.to(tl.float32) * first_low.to(tl.float32)[:, None, :], 2)
    for first in range(BLOCK_R, used, BLOCK_R):
        more = _of_b(b + first, column, mask, RANK).to(tl.float32)
        update += tl.sum(more * tl.load(low + first).to(tl.float32)[:, None, :], 2)
    return sums + update


@triton.jit
def _clipped(x, bound):
    """Return x, bounded to [-bound, bound]."""
    wide = tl.minimum(tl.maximum(x.to(tl.float32), -bound, tl.PropagateNan.ALL), bound, tl.PropagateNan.ALL)
    return wide.to(x.dtype)


@triton.jit
def _normed_parts(
    first, second, rest, norm, bias, mean_squares, own, token, head, firsts, seconds, resting, turns, rests, changes,
    eps, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, CENTERED: tl.constexpr, UNIT_VALUES: tl.constexpr,
):  # fmt: skip
    """Return the three parts of heads, normed by each head's mean square or by that of all heads."""
    mean = 0.0
    if CENTERED:
        sums = tl.zeros((head.shape[0],), tl.float32)
        if HALF > 0:
            sums += tl.sum(first.to(tl.float32), 1) + tl.sum(second.to(tl.float32), 1)
        if D > 2 * HALF:
            sums += tl.sum(rest.to(tl.float32), 1)
        mean = (sums / D)[:, None]
    if mean_squares is not None:
        of_keys = tl.where(head < HEADS, 0, 1)
        scale = tl.rsqrt(tl.load(mean_squares + 2 * token + of_keys) + eps)[:, None]
    else:
        total = tl.zeros((head.shape[0],), tl.float32)
        if HALF > 0:
            total += _squares(first, mean, turns, CENTERED)
            total += _squares(second, mean, turns, CENTERED)
        if D > 2 * HALF:
            total += _squares(rest, mean, rests, CENTERED)
        scale = tl.rsqrt(total / D + eps)[:, None]
    if HALF > 0:
        its = turns & changes[:, None]
        first = _normed(first, mean, scale, norm, bias, own + firsts[None, :], its, changes, CENTERED, UNIT_VALUES)
        second = _normed(second, mean, scale, norm, bias, own + seconds[None, :], its, changes, CENTERED, UNIT_VALUES)
    if D > 2 * HALF:
        its = rests & changes[:, None]
        rest = _normed(
            rest, mean, scale, norm, bias, own + 2 * HALF + resting[None, :], its, changes, CENTERED, UNIT_VALUES
        )
    return first, second, rest


@triton.jit
def _squares(x, mean, mask, CENTERED: tl.constexpr):
    """Return the sum of squares of each head's part, less its mean."""
    wide = x.to(tl.float32)
    if CENTERED:
        wide = tl.where(mask, wide - mean, 0.0)
    return tl.sum(wide * wide, 1)


@triton.jit
def _normed(x, mean, scale, norm, bias, at, mask, changes, CENTERED: tl.constexpr, UNIT_VALUES: tl.constexpr):
    """Return x · scale · weight, rounded before the weight where that has x's dtype; values are unchanged, or x · scale
    (UNIT_VALUES).

    A layer norm is rounded once, and may have a bias.
    """
    weight = tl.load(norm + at, mask, 0.0)
    normed = x.to(tl.float32)
    if CENTERED:
        normed = (normed - mean) * scale
    else:
        normed = normed * scale
        if weight.dtype == x.dtype:
            normed = normed.to(x.dtype).to(tl.float32)
    normed = normed * weight.to(tl.float32)
    if bias is not None:
        normed += tl.load(bias + at, mask, 0.0).to(tl.float32)
    if UNIT_VALUES:
        x = (x.to(tl.float32) * scale).to(x.dtype)
    return tl.where(changes[:, None], normed.to(x.dtype), x)


@triton.jit
def _store(
    x, q, keys, values, scales, token, cache_slot, head, column, mask,
    MOST: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store x [heads, columns] where each head belongs."""
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    of_query = ((token * HEADS + head) * D)[:, None] + column[None, :]
    of_key = ((cache_slot * KV_HEADS + head - HEADS) * D)[:, None] + column[None, :]
    if scales is None:
        tl.store(q + of_query, x, mask & is_query[:, None])
        tl.store(keys + of_key, x, mask & (~is_query & ~is_value)[:, None])
        tl.store(values + of_key - KV_HEADS * D, x, mask & is_value[:, None])
    else:
        number = tl.where(is_query, head // (HEADS // KV_HEADS), head - HEADS)  # keys' scales, then values'
        scale = tl.load(scales + number, head < HEADS + 2 * KV_HEADS, 1.0)[:, None]
        tl.store(q + of_query, (x.to(tl.float32) * scale).to(x.dtype), mask & is_query[:, None])
        stored = _quantized(x.to(tl.float32) / scale, keys.dtype.element_ty, MOST)
        tl.store(keys + of_key, stored, mask & (~is_query & ~is_value)[:, None])
        tl.store(values + of_key - KV_HEADS * D, stored, mask & is_value[:, None])


@triton.jit
def _quantized(x, dtype: tl.constexpr, MOST: tl.constexpr):
    """Round fp32 to the nearest value of the cache's dtype; ties go to the even one."""
    x = tl.minimum(tl.maximum(x, -MOST, propagate_nan=tl.PropagateNan.ALL), MOST, propagate_nan=tl.PropagateNan.ALL)
    if dtype == tl.int8:
        x = (x + 12582912.0) - 12582912.0  # 1.5 · 2²³ leaves no digits behind the point
    return x.to(dtype)


@fast_launch
@triton.jit
def _qk_mean_squares(
    qkv, out, qkv_token, of_query, of_key, QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add up the squares of a token's queries, or of its keys, times a factor."""
    release_dependents(OVERLAP)
    token, of_keys = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = token * qkv_token + of_keys * QUERIES
    count = tl.where(of_keys == 0, QUERIES, KEYS)
    wait_for_inputs(OVERLAP)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(qkv + begin + at, at < count, 0.0).to(tl.float32)
        total += x * x
    factor = tl.where(of_keys == 0, of_query, of_key)
    tl.store(out + 2 * token + of_keys, tl.sum(total, 0) * factor)
