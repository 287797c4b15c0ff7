"""The products of a mixture of experts.

Few tokens, so that hardly two go to the same expert: `gemv_by_pair`. Each program multiplies one pair of token and
expert with a few rows of the expert's weight, and those of the second product add up all of a token's experts, so two
kernels do all. The experts' weights of a pair are read: 2 · 3 · hidden · width bytes of 16-bit weights.

More: `gemm_by_expert`. Pairs stand in the order of experts (see `routing`), and a program multiplies a tile of one
expert's pairs with a tile of its weight on the tensor cores: the gate is applied in the first product, the router's
weight in the second, and a last kernel adds each token's outputs in the order of its choices. Every weight that a token
goes to is read from memory once; second tiles of an expert find it in the cache. With many tokens the tensor cores are
the limit: 6 · pairs · hidden · width operations.

What adapters add to a product is computed before it (see expert_adapters), and added to its sums; steps without such
adapters launch what they would in an engine that serves none.

No sum depends on the order in which programs run. What a kernel reads before it waits for the one before, it reads from
the GPU's shared cache (.cg): its multiprocessor's own may still hold what stood there earlier.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.expert_adapters import ExpertAdapters
from quire.compute.kernels.triton.experts.expert_adapters import AddedRows
from quire.compute.kernels.triton.experts.routing import group_by_expert
from quire.compute.kernels.triton.launching.dependent_launch import release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import fast_launch
from quire.compute.kernels.triton.linear.gemm import GemmConfig
from quire.compute.kernels.triton.linear.gemv import GemvConfig
from quire.compute.kernels.triton.linear.inner_loops import (
    fetch_ahead,
    gates_and_ups,
    gemm_loop,
    gemv_loop,
    silu_times,
    weight_rows,
)

_SUM_BLOCK = 1024


def gemv_by_pair(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    configs: tuple[GemvConfig, GemvConfig],
    overlap: bool,
    partial: bool = False,
    adapters: ExpertAdapters | None = None,
) -> None:
    """Arguments as those of the op `experts`, the configs of both products, and `overlap` as in dependent_launch;
    `partial`: whether some experts are elsewhere. Their pairs are left out."""
    (tokens, hidden), (_, chosen), width = x.shape, numbers.shape, down.shape[2]
    middle = torch.empty((tokens * chosen, width), dtype=x.dtype, device=x.device)
    first, second = configs
    by_adapters = None if adapters is None else AddedRows(numbers, adapters)
    added, slots = added_to(x, middle, True, by_adapters)
    _pair_kernel[(-(-width // (first.block_n // 2)) * tokens * chosen,)](
        x,
        gate_up,
        numbers,
        added,
        slots,
        middle,
        tokens * chosen,
        width,
        len(down),
        CHOSEN=chosen,
        COLUMNS=hidden,
        BLOCK_N=first.block_n,
        BLOCK_K=first.block_k,
        PARTIAL=partial,
        ADAPTED=adapters is not None,
        OVERLAP=overlap,
        num_warps=first.warps,
        launch_pdl=overlap,
    )
    added, slots = added_to(middle, out, False, by_adapters)
    _token_kernel[(-(-hidden // second.block_n) * tokens,)](
        middle,
        down,
        numbers,
        weights,
        added,
        slots,
        out,
        tokens,
        hidden,
        len(down),
        CHOSEN=chosen,
        COLUMNS=width,
        BLOCK_N=second.block_n,
        BLOCK_K=second.block_k,
        PARTIAL=partial,
        ADAPTED=adapters is not None,
        OVERLAP=overlap,
        num_warps=second.warps,
        launch_pdl=overlap,
    )


def gemm_by_expert(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    configs: tuple[GemmConfig, GemmConfig],
    overlap: bool,
    partial: bool = False,
    adapters: ExpertAdapters | None = None,
) -> None:
    """Arguments as those of `gemv_by_pair`; both configs have the same block_m and no splits."""
    (tokens, hidden), (_, chosen), width = x.shape, numbers.shape, down.shape[2]
    first, second = configs
    assert first.block_m == second.block_m and first.splits == second.splits == 1
    order, tiles = group_by_expert(numbers, len(down), first.block_m)
    middle = torch.empty((tokens * chosen, width), dtype=x.dtype, device=x.device)
    parts = torch.empty((tokens * chosen, hidden), dtype=x.dtype, device=x.device)
    added = None if adapters is None else AddedRows(numbers, adapters)
    _launch_tiles(x, gate_up, order, tiles, weights, middle, chosen, first, True, overlap, added)
    _launch_tiles(middle, down, order, tiles, weights, parts, chosen, second, False, overlap, added)
    sum_choices(parts, out, numbers, len(down), overlap, partial)


def sum_choices(parts: Tensor, out: Tensor, numbers: Tensor, experts: int, overlap: bool, partial: bool) -> None:
    """out [tokens, hidden]: the sum of each token's rows of parts [tokens · chosen, hidden].

    Args:
        parts, out: See above.
        numbers: [tokens, chosen], the experts that have made them.
        experts: How many are here.
        overlap, partial: As of `gemv_by_pair`; rows of experts that are elsewhere are left out.
    """
    tokens, hidden = out.shape
    _sum_kernel[(tokens, -(-hidden // _SUM_BLOCK))](
        parts, out, numbers, hidden, experts,
        CHOSEN=numbers.shape[1], BLOCK=_SUM_BLOCK, PARTIAL=partial, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip


def _launch_tiles(
    x: Tensor,
    w: Tensor,
    order: Tensor,
    tiles: Tensor,
    weights: Tensor,
    y: Tensor,
    chosen: int,
    config: GemmConfig,
    first: bool,
    overlap: bool,
    adapters: AddedRows | None,
) -> None:
    places, made, columns = tiles.shape[1], y.shape[1], w.shape[2]
    across = -(-made // (config.block_n // 2 if first else config.block_n))
    added, slots = added_to(x, y, first, adapters)
    _tile_kernel[(across * places,)](
        x,
        w,
        order,
        tiles,
        weights,
        added,
        slots,
        y,
        places,
        made,
        columns,
        CHOSEN=chosen,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        WHOLE=columns % config.block_k == 0,
        SWAPPED=config.swapped,
        FIRST=first,
        ADAPTED=adapters is not None,
        OVERLAP=overlap,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=overlap,
    )


def added_to(x: Tensor, y: Tensor, first: bool, adapters: AddedRows | None) -> tuple[Tensor, Tensor]:
    """What adapters add to the first or second product of x, and the adapter of each token; without adapters, tensors
    that are not looked at."""
    if adapters is None:
        return y, y
    return adapters.to_gate_up(x) if first else adapters.to_down(x), adapters.slots


@fast_launch
@triton.jit(do_not_specialize=["pairs", "experts"], do_not_specialize_on_alignment=["slots"])
def _pair_kernel(
    x,
    w,
    numbers,
    added,
    slots,
    y,
    pairs,
    width,
    experts,
    CHOSEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTIAL: tl.constexpr,
    ADAPTED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """y [pairs, width] = silu(gate) · up. Pairs that share an expert read the same rows at about the same time."""
    pair = tl.program_id(0) % pairs
    begin = tl.program_id(0) // pairs * (BLOCK_N // 2)
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)  # not before, so that the next kernel may read the experts' numbers without waiting
    expert = tl.load(numbers + pair).to(tl.int64)
    if PARTIAL:
        if expert < experts:
            _multiply_pair(
                x, w, added, slots, y, expert, pair, begin, width, CHOSEN, COLUMNS, BLOCK_N, BLOCK_K, ADAPTED
            )
    else:
        _multiply_pair(x, w, added, slots, y, expert, pair, begin, width, CHOSEN, COLUMNS, BLOCK_N, BLOCK_K, ADAPTED)


@triton.jit
def _multiply_pair(
    x,
    w,
    added,
    slots,
    y,
    expert,
    pair,
    begin,
    width,
    CHOSEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ADAPTED: tl.constexpr,
):
    """The outputs from `begin` on of a pair."""
    MADE: tl.constexpr = BLOCK_N // 2
    rows = weight_rows(begin, width, BLOCK_N, True) + expert * (2 * width)
    own = x + (pair // CHOSEN).to(tl.int64) * COLUMNS
    sums = gemv_loop(tl.zeros((BLOCK_N, BLOCK_K), tl.float32), own, w, rows, 1.0, COLUMNS, BLOCK_K, False)
    one = pair.to(tl.int64) + tl.arange(0, 1)
    values = finished(
        tl.sum(sums, 1)[None, :], added, slots, y, one, one >= 0, begin, width, 1, MADE, CHOSEN, True, ADAPTED
    )
    values = tl.reshape(values, (MADE,))
    n = begin + tl.arange(0, MADE)
    tl.store(y + pair.to(tl.int64) * width + n, values.to(y.dtype.element_ty), n < width)


@fast_launch
@triton.jit(do_not_specialize=["tokens", "experts"], do_not_specialize_on_alignment=["slots"])
def _token_kernel(
    x,
    w,
    numbers,
    weights,
    added,
    slots,
    y,
    tokens,
    hidden,
    experts,
    CHOSEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTIAL: tl.constexpr,
    ADAPTED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """y [tokens, hidden]: each token's experts on its rows of x [pairs, COLUMNS], by weight."""
    release_dependents(OVERLAP)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    begin = tl.program_id(0) // tokens * BLOCK_N
    rows = weight_rows(begin, hidden, BLOCK_N, False)
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if PARTIAL:  # which of the experts is the first one here is not known
        wait_for_inputs(OVERLAP)
    for choice in tl.static_range(CHOSEN):
        pair = token * CHOSEN + choice
        expert = tl.load(numbers + pair, cache_modifier=".cg").to(tl.int64)
        scale = tl.load(weights + pair, cache_modifier=".cg").to(tl.float32)
        if PARTIAL:
            if expert < experts:
                own = rows + expert * hidden
                sums = gemv_loop(sums, x + pair * COLUMNS, w, own, scale, COLUMNS, BLOCK_K, False)
        else:
            own = rows + expert * hidden
            sums = gemv_loop(sums, x + pair * COLUMNS, w, own, scale, COLUMNS, BLOCK_K, OVERLAP and choice == 0)
    n = begin + tl.arange(0, BLOCK_N)
    total = tl.sum(sums, 1)
    if ADAPTED:
        total += _added_to_token(added, slots, numbers, weights, token, n, hidden, experts, CHOSEN, BLOCK_N)
    tl.store(y + token * hidden + n, total.to(y.dtype.element_ty), n < hidden)


@triton.jit
def _added_to_token(
    added, slots, numbers, weights, token, n, hidden, experts, CHOSEN: tl.constexpr, BLOCK_N: tl.constexpr
):
    """What a token's adapter adds to the outputs n [BLOCK_N], by the router's weights."""
    total = tl.zeros((BLOCK_N,), tl.float32)
    if tl.load(slots + token) > 0:
        for choice in tl.static_range(CHOSEN):
            pair = token * CHOSEN + choice
            scale = tl.load(weights + pair, cache_modifier=".cg").to(tl.float32)
            end = tl.where(tl.load(numbers + pair, cache_modifier=".cg") < experts, hidden, 0)
            total += scale * tl.load(added + pair * hidden + n, n < end, 0.0).to(tl.float32)
    return total


@fast_launch
@triton.jit(do_not_specialize=["places"], do_not_specialize_on_alignment=["slots"])
def _tile_kernel(
    x,
    w,
    order,
    tiles,
    weights,
    added,
    slots,
    y,
    places,
    made,
    columns,
    CHOSEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
    SWAPPED: tl.constexpr,
    FIRST: tl.constexpr,
    ADAPTED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """y [pairs, made]: x's row of each pair by its expert's weight.

    FIRST, a token's pairs have one row of x, and the weight is a gate and an up; else each has its own, and the result
    is scaled by the router's weight. ADAPTED, rows of tokens with adapters have something added. An expert's last tile
    may have few pairs; where tiles are large, and operations the limit, it goes as one of half the size if it can.
    """
    MADE: tl.constexpr = BLOCK_N // 2 if FIRST else BLOCK_N
    across = tl.cdiv(made, MADE)
    place = tl.program_id(0) // across
    begin = tl.program_id(0) % across * MADE
    if FIRST:  # the tiles come from the kernel before; in the second product from one that the first waited for
        wait_for_inputs(OVERLAP)
        release_dependents(OVERLAP)
    else:
        release_dependents(OVERLAP)
    from_pair = tl.load(tiles + places + place, cache_modifier=".cg")
    to_pair = tl.load(tiles + 2 * places + place, cache_modifier=".cg")
    if from_pair < to_pair:
        own = w + tl.load(tiles + place, cache_modifier=".cg").to(tl.int64) * made * columns * (2 if FIRST else 1)
        rows = weight_rows(begin, made, BLOCK_N, FIRST) * columns
        if not FIRST and OVERLAP:
            fetch_ahead(own, rows, 0, columns, BLOCK_N, 2 * BLOCK_K)
            wait_for_inputs(OVERLAP)
        if BLOCK_M > 64 and to_pair - from_pair <= BLOCK_M // 2:
            _multiply(
                x, own, order, weights, added, slots, y, from_pair, to_pair, begin, made, columns, rows,
                CHOSEN, BLOCK_M // 2, BLOCK_N, BLOCK_K, MADE, WHOLE, SWAPPED, FIRST, ADAPTED,
            )  # fmt: skip
        else:
            _multiply(
                x, own, order, weights, added, slots, y, from_pair, to_pair, begin, made, columns, rows,
                CHOSEN, BLOCK_M, BLOCK_N, BLOCK_K, MADE, WHOLE, SWAPPED, FIRST, ADAPTED,
            )  # fmt: skip


@triton.jit
def _multiply(
    x,
    w,
    order,
    weights,
    added,
    slots,
    y,
    from_pair,
    to_pair,
    begin,
    made,
    columns,
    rows,
    CHOSEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MADE: tl.constexpr,
    WHOLE: tl.constexpr,
    SWAPPED: tl.constexpr,
    FIRST: tl.constexpr,
    ADAPTED: tl.constexpr,
):
    """A tile of at most BLOCK_M pairs, by the weight rows that begin at `rows` and make the outputs from `begin` on."""
    m = from_pair + tl.arange(0, BLOCK_M)
    pair = tl.load(order + m, m < to_pair, 0, cache_modifier=".cg").to(tl.int64)
    values = gemm_loop(
        x,
        (pair // CHOSEN if FIRST else pair) * columns,
        m < to_pair,
        w,
        rows,
        columns,
        0,
        tl.cdiv(columns, BLOCK_K),
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        WHOLE,
        SWAPPED,
    )
    values = finished(
        values, added, slots, weights, pair, m < to_pair, begin, made, BLOCK_M, MADE, CHOSEN, FIRST, ADAPTED
    )
    n = begin + tl.arange(0, MADE)
    inside = (m < to_pair)[:, None] & (n < made)[None, :]
    tl.store(y + pair[:, None] * made + n[None, :], values.to(y.dtype.element_ty), inside)


@triton.jit
def finished(
    values,
    added,
    slots,
    weights,
    pair,
    there,
    begin,
    made,
    ROWS: tl.constexpr,
    MADE: tl.constexpr,
    CHOSEN: tl.constexpr,
    FIRST: tl.constexpr,
    ADAPTED: tl.constexpr,
):
    """[ROWS, MADE]: what becomes of a product's sums for the outputs from `begin` on.

    Args:
        values: [ROWS, MADE], or FIRST [ROWS, 2 · MADE], each gate before its up.
        added: Of rows with adapters, which `slots` says by token, what is added to them.
        weights: The router's, by which they are scaled; FIRST they are gated instead.
        pair, there: [ROWS], whose they are, int64, and which of them there are.
    """
    if ADAPTED:
        n = begin + tl.arange(0, MADE)
        adapted = there & (tl.load(slots + pair // CHOSEN, there, 0) > 0)
        inside = adapted[:, None] & (n < made)[None, :]
        added += pair[:, None] * (2 * made if FIRST else made) + n[None, :]
    if FIRST:
        gate, up = gates_and_ups(values, ROWS, MADE)
        if ADAPTED:
            gate += tl.load(added, inside, 0.0).to(tl.float32)
            up += tl.load(added + made, inside, 0.0).to(tl.float32)
        values = silu_times(gate, up)
    else:
        if ADAPTED:
            values += tl.load(added, inside, 0.0).to(tl.float32)
        values *= tl.load(weights + pair).to(tl.float32)[:, None]
    return values


@fast_launch
@triton.jit(do_not_specialize=["experts"])
def _sum_kernel(
    parts,
    out,
    numbers,
    hidden,
    experts,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTIAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out [tokens, hidden]: the sum of each token's CHOSEN rows of parts."""
    release_dependents(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < hidden
    wait_for_inputs(OVERLAP)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOSEN):
        pair = token * CHOSEN + choice
        if PARTIAL:
            if tl.load(numbers + pair) < experts:
                total += tl.load(parts + pair * hidden + n, inside, 0.0).to(tl.float32)
        else:
            total += tl.load(parts + pair * hidden + n, inside, 0.0).to(tl.float32)
    tl.store(out + token * hidden + n, total.to(out.dtype.element_ty), inside)
