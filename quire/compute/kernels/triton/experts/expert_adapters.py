"""Computes what LoRA adapters add to the products of experts, before the products run.

An adapter has an A and a B for each expert, so (token, expert) pairs are grouped by adapter and expert. A program
multiplies a tile of one group's pairs by some ranks of A, or by the rows of B for some outputs. Memory is read once for
each A or B that pairs need; further tiles of a group find it in the cache.

The grid has room for as many tiles as there can be, so that launches depend only on the number of tokens. A program
without a tile ends at once. Few tokens make few programs, which wait for memory, so several programs then share the
columns of a tile, as in lora.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.experts import ExpertAdapters, StackedLowRank
from quire.compute.kernels.triton.experts.routing import group_by_adapter
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, next_power_of_2
from quire.compute.kernels.triton.linear.inner_loops import gemm_loop
from quire.compute.kernels.triton.lora import WIDEST_RANK, scratch_of_splits, store_split_sum

_TILE, _LARGE_TILE = 16, 64
"""Pairs in a tile: the fewest that a tensor core multiplies, and more where groups may be large."""
_FEW = 64
"""Tiles are small up to this average number of pairs for each expert."""
_PROGRAMS = 264
"""The number of programs that keeps an H100 busy: two for each multiprocessor."""
_LEAST_COLUMNS, _MAX_SPLITS = 512, 16
"""The minimum columns of a program that shares a tile, and the maximum number of programs that share one."""
_BLOCK_N = 128
_WARPS = 4


class AdaptedTiles(NamedTuple):
    """The pairs that adapters change, in tiles.

    Attributes:
        order, tiles: As group_by_adapter returns them.
        size: The maximum number of pairs in a tile.
    """

    order: Tensor
    tiles: Tensor
    size: int


def added_rows(
    numbers: Tensor, adapters: ExpertAdapters | None
) -> Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]:
    """Return a function that computes what adapters add to a product in one layer and step.

    The function takes x, y and whether y is the first product of x rather than the second. It returns the summands of
    y, [pairs, outputs], whose rows are undefined where a token has no adapter, and the slot of each token's adapter.
    Without adapters, it returns tensors that no kernel reads. Arguments as in `experts`.
    """
    if adapters is None:
        return lambda x, y, first: (y, y)
    pairs = group_adapted_pairs(numbers, adapters.slots, adapters.gate_up)

    def added(x: Tensor, y: Tensor, first: bool) -> tuple[Tensor, Tensor]:
        weights, sharing = (adapters.gate_up, numbers.shape[1]) if first else (adapters.down, 1)
        return lora_of_pairs(x, weights, pairs, sharing), adapters.slots

    return added


def group_adapted_pairs(numbers: Tensor, slots: Tensor, weights: StackedLowRank) -> AdaptedTiles:
    """Implement reference/experts.py's `group_adapted_pairs`; the numbers are int32."""
    adapters, experts = weights.ranks.shape
    size = _TILE if next_power_of_2(numbers.numel()) <= _FEW * experts else _LARGE_TILE
    return AdaptedTiles(*group_by_adapter(numbers, slots, experts, adapters, size), size)


def lora_of_pairs(x: Tensor, weights: StackedLowRank, pairs: AdaptedTiles, sharing: int) -> Tensor:
    """Implement reference/experts.py's `lora_of_pairs`.

    x is contiguous, and the rank is a multiple of 16. Rows that are in no tile are undefined.
    """
    assert x.is_contiguous() and weights.a.stride(3) == weights.b.stride(3) == 1
    (_, experts), (*_, outputs, rank), columns = weights.ranks.shape, weights.b.shape, x.shape[1]
    number, places, modules, overlap = len(pairs.order), pairs.tiles.shape[1], weights.modules, can_overlap(x.device)
    added, low = x.new_empty((number, outputs)), x.new_empty((number, modules * rank))
    if not number:
        return added
    block_rank, in_fp32 = min(rank & -rank, WIDEST_RANK), x.dtype == torch.float32
    block_k = 64 if in_fp32 else 256 if pairs.size == _TILE else 128
    of_place = modules * (rank // block_rank)
    splits = _splits(number, pairs.size, weights.ranks.numel(), of_place, columns)
    blocks = places * of_place
    partial, arrived = scratch_of_splits(low, blocks, splits, pairs.size * block_rank)
    _shrink_pairs[(blocks * splits,)](
        x, weights.a, weights.ranks, pairs.order, pairs.tiles, partial, arrived, low, places,
        weights.a.stride(0), weights.a.stride(1), weights.ranks.stride(0), weights.ranks.stride(1),
        EXPERTS=experts, SHARING=sharing, COLUMNS=columns, RANK=rank, MODULES=modules, SPLITS=splits,
        SPLITS_UP=next_power_of_2(splits), BLOCK_M=pairs.size, BLOCK_R=block_rank, BLOCK_K=block_k, OVERLAP=overlap,
        num_warps=_WARPS, launch_pdl=overlap,
    )  # fmt: skip
    _expand_pairs[(places * modules * cdiv(outputs // modules, _BLOCK_N),)](
        low, weights.b, weights.ranks, pairs.order, pairs.tiles, added, places,
        weights.b.stride(0), weights.b.stride(1), weights.ranks.stride(0), weights.ranks.stride(1),
        EXPERTS=experts, ROWS=outputs // modules, RANK=rank, MODULES=modules, BLOCK_M=pairs.size, BLOCK_R=block_rank,
        BLOCK_N=_BLOCK_N, OVERLAP=overlap, num_warps=_WARPS, launch_pdl=overlap,
    )  # fmt: skip
    return added


def _splits(pairs: int, size: int, groups: int, of_place: int, columns: int) -> int:
    """Return how many programs share the columns of a tile: the fewest that keep the GPU busy.

    All numbers of pairs up to a power of two give the same result, so that the compile warm-up finds each kernel.
    """
    most = next_power_of_2(pairs)
    blocks = min(most, most // size + groups) * of_place
    return max(1, min(_PROGRAMS // blocks, columns // _LEAST_COLUMNS, _MAX_SPLITS))


@fast_launch
@triton.jit(do_not_specialize=["places"], do_not_specialize_on_alignment=["ranks", "ranks_of_slot"])
def _shrink_pairs(
    x, a, ranks, order, tiles, partial, arrived, low, places, slot_stride, expert_stride, ranks_of_slot,
    ranks_of_expert, EXPERTS: tl.constexpr, SHARING: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
    MODULES: tl.constexpr, SPLITS: tl.constexpr, SPLITS_UP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_R ranks of one module of low [pairs, MODULES · RANK], over one of SPLITS parts of the columns.

    Dependents start only when all kernels before this one have ended, so the next kernel may read tiles before it
    waits.
    """
    GROUPS: tl.constexpr = RANK // BLOCK_R
    STEPS: tl.constexpr = (COLUMNS + BLOCK_K - 1) // BLOCK_K
    EACH: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    split = tl.program_id(0) % SPLITS
    group = tl.program_id(0) // SPLITS % GROUPS
    module = tl.program_id(0) // (SPLITS * GROUPS) % MODULES
    place = tl.program_id(0) // (SPLITS * GROUPS * MODULES)
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)
    from_pair = tl.load(tiles + places + place)
    to_pair = tl.load(tiles + 2 * places + place)
    if from_pair >= to_pair:
        return
    own = tl.load(tiles + place)
    slot, expert = (own // EXPERTS).to(tl.int64), (own % EXPERTS).to(tl.int64)
    if tl.load(ranks + slot * ranks_of_slot + expert * ranks_of_expert) <= group * BLOCK_R:
        return
    m = from_pair + tl.arange(0, BLOCK_M)
    pair = tl.load(order + m, m < to_pair, 0).to(tl.int64)
    rank = module * RANK + group * BLOCK_R + tl.arange(0, BLOCK_R)
    sums = gemm_loop(
        x, pair // SHARING * COLUMNS, m < to_pair, a + slot * slot_stride + expert * expert_stride,
        rank.to(tl.int64) * COLUMNS, COLUMNS, split * EACH, tl.minimum(split * EACH + EACH, STEPS),
        BLOCK_M, BLOCK_R, BLOCK_K, COLUMNS % BLOCK_K == 0, False,
    )  # fmt: skip
    to = low + pair[:, None] * (MODULES * RANK) + rank[None, :]
    there = (m < to_pair)[:, None]
    store_split_sum(
        sums, to, there, partial, arrived, tl.program_id(0) // SPLITS, split, SPLITS, SPLITS_UP, BLOCK_M, BLOCK_R
    )


@fast_launch
@triton.jit(do_not_specialize=["places"], do_not_specialize_on_alignment=["ranks", "ranks_of_slot"])
def _expand_pairs(
    low, b, ranks, order, tiles, added, places, slot_stride, expert_stride, ranks_of_slot, ranks_of_expert,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, MODULES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of one module for a tile's pairs; they are 0 where the adapter does not change the
    expert.

    The kernel reads the tiles, from the shared cache, and the weights of the first ranks before A x is complete.
    """
    release_dependents(OVERLAP)
    ACROSS: tl.constexpr = (ROWS + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) % ACROSS
    module = tl.program_id(0) // ACROSS % MODULES
    place = tl.program_id(0) // (ACROSS * MODULES)
    from_pair = tl.load(tiles + places + place, cache_modifier=".cg")
    to_pair = tl.load(tiles + 2 * places + place, cache_modifier=".cg")
    if from_pair >= to_pair:
        wait_for_inputs(OVERLAP)  # whoever waits for this kernel must see the work of those before it
        return
    own = tl.load(tiles + place, cache_modifier=".cg")
    slot, expert = (own // EXPERTS).to(tl.int64), (own % EXPERTS).to(tl.int64)
    used = tl.load(ranks + slot * ranks_of_slot + expert * ranks_of_expert)
    m = from_pair + tl.arange(0, BLOCK_M)
    there = (m < to_pair)[:, None]
    pair = tl.load(order + m, m < to_pair, 0, cache_modifier=".cg").to(tl.int64)[:, None]
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < ROWS
    rank = tl.arange(0, BLOCK_R)
    b += slot * slot_stride + expert * expert_stride + (module * ROWS + n)[:, None] * RANK + rank[None, :]
    low += pair * (MODULES * RANK) + module * RANK + rank[None, :]
    weight = tl.load(b, inside[:, None], 0.0)
    wait_for_inputs(OVERLAP)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, used, BLOCK_R):
        if first > 0:
            weight = tl.load(b + first, inside[:, None], 0.0)
        sums = tl.dot(tl.load(low + first, there, 0.0), tl.trans(weight), sums, input_precision="ieee")
    to = added + pair * (MODULES * ROWS) + module * ROWS + n[None, :]
    tl.store(to, sums.to(added.dtype.element_ty), there & inside[None, :])
