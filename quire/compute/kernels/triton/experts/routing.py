"""Chooses each token's experts, and sorts pairs of token and choice by expert.

Choosing: each token has one warp. A logit and its expert's number make one 64-bit key, so that each of the `chosen`
rounds is one maximum, and of equal logits the lower number is taken.

Grouping: a product over an expert's tokens is cut into tiles of some rows. Only the GPU knows how many tokens an expert
has, so there are places for as many tiles as there can be. The tiles of expert e begin at place `pairs before e // tile
+ e`, which leaves every expert enough places, or at `pairs before e`, if that is less. Each expert has a program, which
counts the pairs before its own, writes its own in their order, and fills its places; no program waits for another. The
last program also marks the places of experts on other ranks as empty.

Rows that products take as 8-bit codes are quantized by further programs of the same launch, one for each token. Pairs
with adapters are grouped once more in the same way, by adapter and expert; pairs of other tokens are in no group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.quantized_rows import LARGEST, SMALLEST
from quire.compute.kernels.routing import Routing
from quire.compute.kernels.triton.activation import tanh
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, next_power_of_2
from quire.compute.kernels.triton.norm import GROUPS, quantize_groups

_BLOCKS = ((512, 1), (2048, 4), (4096, 8), (8192, 16))
"""(pairs that a program reads together, its warps): the first entry with room for all pairs is used, or the last."""
_ADDED = 1024
"""Elements of a row that a program adds."""
_ELEMENTS_PER_WARP = 2048
"""Elements of a row for each warp that quantizes it."""
_MAX_RANKED = tl.constexpr(32)
"""The most experts of which each is compared with all others, at once."""


def pack_router(weight: Tensor) -> Tensor:
    return weight


def router_logits(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    if x.dtype == packed.dtype and x.is_cuda:
        logits = torch.mm(x, packed.t(), out_dtype=torch.float32)
        return logits if bias is None else logits + bias
    return F.linear(x.float(), packed.float(), bias)


def route(
    logits: Tensor,
    routing: Routing,
    first: int = 0,
    count: int | None = None,
    correction: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Implement reference/experts.py's `route`; logits are contiguous, and the numbers are int32."""
    assert logits.is_contiguous()
    (tokens, experts), chosen = logits.shape, routing.chosen
    weights = torch.empty((tokens, chosen), dtype=dtype or logits.dtype, device=logits.device)
    numbers = torch.empty((tokens, chosen), dtype=torch.int32, device=logits.device)
    overlap = can_overlap(logits.device)
    if tokens:
        _route_kernel[(tokens,)](
            logits, correction, weights, numbers, EXPERTS=experts, BLOCK=1 << (experts - 1).bit_length(), CHOSEN=chosen,
            SLOTS=1 << (chosen - 1).bit_length(), RENORMALISE=routing.renormalise, FIRST=first,
            COUNT=experts if count is None else count, SCORING=routing.scoring, GROUPS=routing.groups,
            GROUPS_UP=1 << (routing.groups - 1).bit_length(), KEPT=routing.kept_groups,
            BEST_TWO=routing.of_best_two, SCALE=routing.scale, EPSILON=routing.epsilon,
            CAP=routing.cap, MARGIN=routing.margin, OVERLAP=overlap, num_warps=1, launch_pdl=overlap,
        )  # fmt: skip
    return weights, numbers


def add_gated(out: Tensor, y: Tensor, gate: Tensor | None = None, factor: float = 1.0) -> None:
    assert out.is_contiguous() and y.is_contiguous()
    rows, width = out.shape
    overlap = can_overlap(out.device)
    if rows:
        _add_gated_kernel[(rows * cdiv(width, _ADDED),)](
            out, y, gate, WIDTH=width, FACTOR=factor, BLOCK=_ADDED, OVERLAP=overlap, num_warps=4, launch_pdl=overlap
        )


def group_by_expert(numbers: Tensor, experts: int, tile: int) -> tuple[Tensor, Tensor]:
    """Sort pairs by expert, and cut them into tiles.

    Args:
        numbers: [tokens, chosen] int32, contiguous; pair p is choice p % chosen of token p // chosen. Pairs with the
            number `experts` are left out.
        experts: The number of experts.
        tile: The maximum number of pairs in a tile.

    Returns:
        [pairs] int32, the pairs, expert by expert, and undefined entries behind them; and [3, places] int32, for each
            place of a tile its expert and the begin and end of its pairs among all. There are no more places than
            pairs.
    """
    return _group(numbers, None, experts, experts, tile)


def group_and_quantize(
    numbers: Tensor, experts: int, tile: int, x: Tensor, dtype: torch.dtype, group: int
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Compute `group_by_expert` and, in one launch with it, `quantize_rows` of x [tokens, columns], contiguous."""
    tokens, columns = x.shape
    group = min(group, columns)
    codes = torch.empty((tokens, columns), dtype=dtype, device=x.device)
    scales = torch.empty((tokens, cdiv(columns, group)), dtype=torch.float32, device=x.device)
    order, tiles = _group(numbers, None, experts, experts, tile, (x, codes, scales, group))
    return order, tiles, (codes, scales)


def group_by_adapter(numbers: Tensor, slots: Tensor, experts: int, adapters: int, tile: int) -> tuple[Tensor, Tensor]:
    """Sort pairs by adapter and expert, and cut them into tiles.

    Args:
        numbers, experts, tile: As in group_by_expert.
        slots: [tokens] int64, contiguous, the adapter of each token, from 1 to `adapters`; 0: its pairs are left out.
        adapters: The number of adapters.

    Returns:
        As group_by_expert; in place of an expert, a tile has `adapter · experts + expert`, with adapters from 0 on.
    """
    assert slots.is_contiguous()
    return _group(numbers, slots, experts, adapters * experts, tile)


def _group(
    numbers: Tensor,
    slots: Tensor | None,
    experts: int,
    groups: int,
    tile: int,
    quantized: tuple[Tensor, Tensor, Tensor, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sort pairs by group; `quantized` has rows, their codes and scales, and how many columns share a scale."""
    pairs = numbers.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=numbers.device)
    tiles = torch.empty((3, min(pairs, pairs // tile + groups)), dtype=torch.int32, device=numbers.device)
    block, warps = next((config for config in _BLOCKS if pairs <= config[0]), _BLOCKS[-1])
    rows, columns, of_scale, largest = 0, 1, 1, 1.0
    x = codes = scales = None
    if quantized is not None:
        x, codes, scales, of_scale = quantized
        (rows, columns), largest = x.shape, LARGEST[codes.dtype]
    of_row, of_scale_up = cdiv(columns, of_scale), next_power_of_2(of_scale)
    together = min(GROUPS, next_power_of_2(of_row))
    warps = max(warps, min(8, together * of_scale_up // _ELEMENTS_PER_WARP))
    overlap = can_overlap(numbers.device)
    chunks = max(1, cdiv(pairs, block))
    _group_kernel[(groups * chunks + rows,)](
        numbers, slots, order, tiles, x, codes, scales, pairs, chunks, tiles.shape[1], experts, groups, largest,
        SMALLEST, CHOSEN=numbers.shape[1], TILE=tile, BLOCK=block, COLUMNS=columns, SCALED=of_scale,
        SCALES=of_row, SCALED_UP=of_scale_up, TOGETHER=together, OVERLAP=overlap,
        num_warps=warps, launch_pdl=overlap,
    )  # fmt: skip
    return order, tiles


@fast_launch
@triton.jit
def _route_kernel(
    logits, correction, weights, numbers, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
    SLOTS: tl.constexpr, RENORMALISE: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, SCORING: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_UP: tl.constexpr, KEPT: tl.constexpr, BEST_TWO: tl.constexpr, SCALE: tl.constexpr,
    EPSILON: tl.constexpr, CAP: tl.constexpr, MARGIN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    release_dependents(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    there = expert < EXPERTS
    wait_for_inputs(OVERLAP)
    values = tl.load(logits + token * EXPERTS + expert, there, float("-inf")).to(tl.float32)
    if CAP is not None:
        values = tl.where(there, CAP * tanh(values / CAP), values)
    shares = _scores(values, SCORING)
    preferred = values
    if correction is not None or KEPT < GROUPS:
        preferred = shares
    if correction is not None:
        preferred += tl.load(correction + expert, there, 0.0)
    least = -0x8000000000000000
    keys = tl.where(there, _keys(preferred, expert, BLOCK), least)  # no expert's key is the least one
    if KEPT < GROUPS:
        kept = _best_groups(keys, preferred, expert // (EXPERTS // GROUPS), GROUPS, GROUPS_UP, KEPT, BEST_TWO)
        keys = tl.where(kept, keys, least)
    if SCORING != "sparsemixer" and BLOCK <= _MAX_RANKED:
        slot = tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), 1)  # each expert's place in the order of all
        taken = slot < CHOSEN
        chosen, chosen_shares = expert, tl.where(taken, shares, 0.0)
    else:
        slot, taken = tl.arange(0, SLOTS), tl.arange(0, SLOTS) < CHOSEN
        chosen, chosen_shares = _best_in_turn(keys, values, shares, expert, BLOCK, CHOSEN, SLOTS, SCORING, MARGIN)
    if RENORMALISE:
        total = tl.sum(chosen_shares, 0)
        if EPSILON > 0:
            total += EPSILON
        chosen_shares = chosen_shares / total
    if SCALE != 1:
        chosen_shares = chosen_shares * SCALE
    tl.store(weights + token * CHOSEN + slot, chosen_shares.to(weights.dtype.element_ty), taken)
    if COUNT < EXPERTS:
        chosen = tl.where((chosen >= FIRST) & (chosen < FIRST + COUNT), chosen - FIRST, COUNT)
    tl.store(numbers + token * CHOSEN + slot, chosen, taken)


@triton.jit
def _best_in_turn(
    keys, values, shares, expert, BLOCK: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr,
    SCORING: tl.constexpr, MARGIN: tl.constexpr,
):  # fmt: skip
    """Return the numbers and shares of the experts with the largest keys, [SLOTS], one after the other."""
    least = -0x8000000000000000
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.int32)
    chosen_shares = tl.zeros((SLOTS,), tl.float32)
    for place in tl.static_range(CHOSEN):
        best = tl.max(keys, 0)
        number = BLOCK - (best & 0xFFFFFFFF).to(tl.int32)
        chosen = tl.where(slot == place, number, chosen)
        if SCORING == "sparsemixer":
            most = tl.sum(tl.where(expert == number, values, 0.0), 0)
            far = (most - values) / tl.maximum(tl.abs(values), most) > 2 * MARGIN
            share = 1 / tl.sum(tl.where((keys == least) | far, 0.0, tl.exp(values - most)), 0)
        else:
            share = tl.sum(tl.where(expert == number, shares, 0.0), 0)
        chosen_shares = tl.where(slot == place, share, chosen_shares)
        keys = tl.where(keys == best, least, keys)
    return chosen, chosen_shares


@triton.jit
def _scores(values, SCORING: tl.constexpr):
    """Return the scores of logits; sparsemixer's depend on the choice."""
    scores = values
    if SCORING == "softmax":
        scores = tl.exp(values - tl.max(values, 0))
        scores = scores / tl.sum(scores, 0)  # NaN for all, if one of the logits is
    if SCORING == "sigmoid":
        scores = 1 / (1 + tl.exp(-values))
    if SCORING == "sqrtsoftplus":
        small = tl.exp(-tl.abs(values))
        rounded = 1 + small
        log1p = tl.where(rounded == 1, small, tl.log(rounded) * small / (rounded - 1))  # exact near 0
        scores = tl.sqrt(tl.maximum(values, 0) + log1p)
    return scores


@triton.jit
def _keys(values, expert, BLOCK: tl.constexpr):
    """Return int64 keys that compare like the values, NaN included; of equal ones, the lower number's is larger."""
    bits = values.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) + (BLOCK - expert)


@triton.jit
def _best_groups(
    keys, scores, group, GROUPS: tl.constexpr, GROUPS_UP: tl.constexpr, KEPT: tl.constexpr, BEST_TWO: tl.constexpr
):
    """Return which experts are in the best groups, [BLOCK]; `group` has the experts' groups."""
    least = -0x8000000000000000
    place = tl.arange(0, GROUPS_UP)
    of_groups = tl.full((GROUPS_UP,), float("-inf"), tl.float32)
    for number in tl.static_range(GROUPS):
        own = tl.where(group == number, keys, least)
        best = tl.max(own, 0)
        total = tl.sum(tl.where(own == best, scores, 0.0), 0)
        if BEST_TWO:
            rest = tl.where(own == best, least, own)
            second = tl.max(rest, 0)
            total += tl.sum(tl.where((rest == second) & (rest != least), scores, 0.0), 0)
        of_groups = tl.where(place == number, total, of_groups)
    left = tl.where(place < GROUPS, _keys(of_groups, place, GROUPS_UP), least)
    kept = group < 0
    for _ in tl.static_range(KEPT):
        best = tl.max(left, 0)
        kept |= group == GROUPS_UP - (best & 0xFFFFFFFF).to(tl.int32)
        left = tl.where(left == best, least, left)
    return kept


@fast_launch
@triton.jit
def _add_gated_kernel(
    out, y, gate, WIDTH: tl.constexpr, FACTOR: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    release_dependents(OVERLAP)
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row, column = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    wait_for_inputs(OVERLAP)
    added = tl.load(y + row * WIDTH + column, inside, 0.0).to(tl.float32)
    if gate is not None:
        added = added * tl.sigmoid(tl.load(gate + row).to(tl.float32))
    total = tl.load(out + row * WIDTH + column, inside, 0.0).to(tl.float32) + added
    tl.store(out + row * WIDTH + column, (total * FACTOR).to(out.dtype.element_ty), inside)


@fast_launch
@triton.jit(
    do_not_specialize=["pairs", "chunks", "places", "experts", "groups"], do_not_specialize_on_alignment=["slots"]
)
def _group_kernel(
    numbers, slots, order, tiles, x, codes, scales, pairs, chunks, places, experts, groups, largest, smallest,
    CHOSEN: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, SCALED: tl.constexpr,
    SCALES: tl.constexpr, SCALED_UP: tl.constexpr, TOGETHER: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Group pairs by expert, or, with slots, by adapter and expert.

    A program writes those of one group among BLOCK of all pairs. With x, programs behind these quantize a row each,
    TOGETHER scales at a time, each for SCALED of its COLUMNS.
    """
    release_dependents(OVERLAP)
    program = tl.program_id(0)
    wait_for_inputs(OVERLAP)
    if x is None or program < groups * chunks:
        _group_pairs(
            program // chunks, program % chunks, numbers, slots, order, tiles, pairs, places, experts, groups,
            CHOSEN, TILE, BLOCK,
        )  # fmt: skip
    else:
        row = (program - groups * chunks).to(tl.int64)
        for first in tl.static_range(0, SCALES, TOGETHER):
            quantize_groups(
                x + row * COLUMNS, codes + row * COLUMNS, scales + row * SCALES, first + tl.arange(0, TOGETHER),
                largest, smallest, COLUMNS, SCALED, SCALES, SCALED_UP,
            )  # fmt: skip


@triton.jit
def _group_pairs(
    group, chunk, numbers, slots, order, tiles, pairs, places, experts, groups,
    CHOSEN: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a group's pairs among BLOCK of all, and, for the first of these, the group's tiles."""
    whole = pairs // BLOCK * BLOCK  # as far as no load needs a mask, they are of 16 bytes
    rest = whole + tl.arange(0, BLOCK)
    own = tl.load(numbers + rest, rest < pairs, 0x7FFFFFFF)
    if slots is not None:
        own = _adapted_groups(own, slots, rest, pairs, experts, CHOSEN)
    theirs, ours = (own < group).to(tl.int32), (own == group).to(tl.int32)
    earlier = tl.zeros_like(ours)
    for begin in tl.range(0, whole, BLOCK, num_stages=3):
        pair = begin + tl.arange(0, BLOCK)
        other = tl.load(numbers + pair)
        if slots is not None:
            other = _adapted_groups(other, slots, pair, pairs, experts, CHOSEN)
        theirs += (other < group).to(tl.int32)
        ours += (other == group).to(tl.int32)
        earlier += ((other == group) & (begin < chunk * BLOCK)).to(tl.int32)
    before = tl.sum(theirs, 0)
    pair = chunk * BLOCK + tl.arange(0, BLOCK)
    if chunk * BLOCK < whole:
        own = tl.load(numbers + pair)
        if slots is not None:
            own = _adapted_groups(own, slots, pair, pairs, experts, CHOSEN)
    _write_pairs(order, before + tl.sum(earlier, 0), pair, own == group)
    if chunk == 0:
        _write_tiles(tiles, before, before + tl.sum(ours, 0), group, places, groups, TILE)


@triton.jit
def _write_tiles(tiles, before, end, group, places, groups, TILE: tl.constexpr):
    """Write the tiles of a group's pairs, of which there are `before` to `end` among all."""
    first = tl.minimum(before, before // TILE + group)
    last = tl.where(group + 1 < groups, tl.minimum(end, end // TILE + group + 1), places)
    for some in range(first, last, 32):
        place = some + tl.arange(0, 32)
        from_pair = tl.minimum(before + (place - first) * TILE, end)
        tl.store(tiles + place, tl.zeros_like(place) + group, place < last)
        tl.store(tiles + places + place, from_pair, place < last)
        tl.store(tiles + 2 * places + place, tl.minimum(from_pair + TILE, end), place < last)


@triton.jit
def _adapted_groups(numbers, slots, pair, pairs, experts, CHOSEN: tl.constexpr):
    """Return each pair's group of adapter and expert; pairs without either get a number behind all groups."""
    slot = tl.load(slots + pair // CHOSEN, pair < pairs, 0).to(tl.int32)
    return tl.where((slot > 0) & (numbers < experts), (slot - 1) * experts + numbers, 0x7FFFFFFF)


@triton.jit
def _write_pairs(order, end, pair, own):
    """Write the pairs that are `own` to order, from `end` on."""
    counts = tl.cumsum(own.to(tl.int32), 0)
    tl.store(order + end + counts - 1, pair, own)
