"""Computes the products of a mixture of experts with dense weights, 8-bit codes with scales, or other codes.

`gemv_by_pair` serves few tokens, of which hardly two go to the same expert. A program of the first kernel multiplies
one (token, expert) pair by a few rows of the expert's weight; a program of the second kernel adds up all of a token's
experts. Each pair reads 3 · hidden · width values. fp8 is widened in registers.

`gemm_by_expert` serves more tokens. Pairs are sorted by expert (see `routing`), and a program multiplies a tile of one
expert's pairs by a tile of its weight on the tensor cores. The first product applies the gate, the second one applies
the router's weight, and a last kernel adds each token's outputs in the order of its choices. Memory is read once for
each weight that tokens go to; further tiles of an expert find it in the cache. With many tokens the 6 · pairs · hidden
· width operations of the tensor cores are the limit.

8-bit codes are multiplied without expansion. The kernel that groups pairs also quantizes the tokens. The first product
quantizes its result with a scale for each tile of outputs, because no program sees a whole row. The second product
applies that scale at each step, and a step has at most the columns of one such tile. Other codes are expanded in the
loop, and their activations stay dense.

What adapters add to a product is computed before it (see expert_adapters) and then added to its sums. A step without
such adapters launches the same kernels as an engine without adapters.

No sum depends on the order in which programs run. Data that a kernel reads before it waits for the previous kernel
comes from the GPU's shared cache (.cg), because the multiprocessor's own cache may still hold older values.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.activations import SILU, Activation
from quire.compute.kernels.reference.experts import ExpertAdapters, ExpertBiases
from quire.compute.kernels.reference.linear import ScaledWeight
from quire.compute.kernels.reference.quantized_rows import LARGEST, SMALLEST
from quire.compute.kernels.triton.experts.expert_adapters import added_rows
from quire.compute.kernels.triton.experts.routing import group_and_quantize, group_by_expert
from quire.compute.kernels.triton.launching.dependent_launch import release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import cdiv, fast_launch, next_power_of_2
from quire.compute.kernels.triton.linear.coded_gemm import (
    AnyCoded,
    CodedArguments,
    coded_arguments,
    coded_loop,
    facts_of,
)
from quire.compute.kernels.triton.linear.gemm import GemmConfig
from quire.compute.kernels.triton.linear.gemv import GemvConfig
from quire.compute.kernels.triton.linear.inner_loops import (
    fetch_ahead,
    gates_and_ups,
    gemm_loop,
    gemv_loop,
    scaled_by_group,
    silu_times,
    weight_rows,
)
from quire.compute.kernels.triton.norm import quantize_rows, row_scales, to_codes

ExpertsWeight: TypeAlias = "Tensor | AnyCoded | ScaledWeight"  # as text: compiler processes have no torch
"""The weights of all experts, [experts, rows, columns], or codes in the reference's form with a leading expert
dimension."""
ExpertConfigs = tuple[GemvConfig, GemvConfig] | tuple[GemmConfig, GemmConfig]
"""The configs of the first product, whose rows of the weight are gates and ups together, and of the second product."""
Table = dict[tuple[int, int, int, int], tuple[tuple[float, ExpertConfigs], ...]]
"""By (experts, chosen, hidden, width): pairs of a maximum number of tokens and the configs of both products."""

_SUM_BLOCK = 1024
_QUANTIZED_BESIDE = 512
"""Up to this many tokens, grouping and quantizing share a launch; with more pairs, programs would be too large."""
_MANY = 128
"""From this many rows in a tile, tensor cores are the limit, so sums of 8-bit floats stay in them to the end."""


def gemv_by_pair(
    x: Tensor,
    gate_up: Tensor | ScaledWeight,
    down: Tensor | ScaledWeight,
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    configs: tuple[GemvConfig, GemvConfig],
    overlap: bool,
    partial: bool = False,
    adapters: ExpertAdapters | None = None,
    activation: Activation = SILU,
    biases: ExpertBiases | None = None,
) -> None:
    """Compute the op `experts` pair by pair.

    Args:
        x, gate_up, down, numbers, weights, out, adapters, activation, biases: As in `experts`.
        configs: The configs of both products.
        overlap: As in dependent_launch.
        partial: Whether some experts are on other ranks; pairs of such experts are left out.
    """
    (tokens, hidden), chosen = x.shape, numbers.shape[1]
    w, w_scales, w_facts = _widened(gate_up)
    of_down, down_scales, down_facts = _widened(down)
    width = of_down.shape[2]
    middle = torch.empty((tokens * chosen, width), dtype=x.dtype, device=x.device)
    first, second = configs
    added_to = added_rows(numbers, adapters)
    of_gate_up, of_down_bias = biases or (None, None)
    added, slots = added_to(x, middle, True)
    _pair_kernel[(cdiv(width, first.block_n // 2) * tokens * chosen,)](
        x, w, w_scales, of_gate_up, numbers, added, slots, middle, tokens * chosen, width, len(of_down), CHOSEN=chosen,
        **constants_of(activation), COLUMNS=hidden, BLOCK_N=first.block_n, BLOCK_K=first.block_k, **w_facts,
        PARTIAL=partial, ADAPTED=adapters is not None, OVERLAP=overlap, num_warps=first.warps, launch_pdl=overlap,
    )  # fmt: skip
    added, slots = added_to(middle, out, False)
    _token_kernel[(cdiv(hidden, second.block_n) * tokens,)](
        middle, of_down, down_scales, of_down_bias, numbers, weights, added, slots, out, tokens, hidden, len(of_down),
        CHOSEN=chosen, SLOTS=next_power_of_2(chosen), COLUMNS=width, BLOCK_N=second.block_n, BLOCK_K=second.block_k,
        **down_facts, PARTIAL=partial, ADAPTED=adapters is not None, OVERLAP=overlap, num_warps=second.warps,
        launch_pdl=overlap,
    )  # fmt: skip


def _widened(weight: Tensor | ScaledWeight) -> tuple[Tensor, Tensor | None, dict[str, int]]:
    """Return the values or codes, their scales, and the constants that kernels are compiled for."""
    if isinstance(weight, Tensor):
        return weight, None, {"GROUPS": 0, "GROUP": 0, "SCALE_ROWS": 1}
    facts = {"GROUPS": weight.scales.shape[2], "GROUP": _group_of(weight), "SCALE_ROWS": weight.block[0]}
    return weight.codes, weight.scales, facts


def _group_of(weight: ScaledWeight) -> int:
    """Return how many columns of a row share a scale; 0: all."""
    return weight.block[1] if weight.scales.shape[2] > 1 else 0


class _Rows(NamedTuple):
    """Rows of activations: dense, or 8-bit codes with a scale for each `group` of columns; a group of 0 is a whole
    row."""

    values: Tensor
    scales: Tensor | None = None
    group: int = 0


def gemm_by_expert(
    x: Tensor,
    gate_up: ExpertsWeight,
    down: ExpertsWeight,
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    configs: tuple[GemmConfig, GemmConfig],
    overlap: bool,
    partial: bool = False,
    adapters: ExpertAdapters | None = None,
    activation: Activation = SILU,
    biases: ExpertBiases | None = None,
) -> None:
    """Compute the op `experts` expert by expert; arguments as in `gemv_by_pair`.

    Both configs have the same block_m and no splits. With 8-bit codes, each block_k divides a weight's blocks. If the
    second block_k does not divide the outputs of the first product's tiles, rows are quantized between the products.
    """
    first, second = configs
    assert first.block_m == second.block_m and first.splits == second.splits == 1
    w, of_down, of_tile = _arguments(gate_up), _arguments(down), first.block_n // 2
    order, tiles, rows = _grouped(x, gate_up, numbers, first.block_m)
    codes = down.codes.dtype if isinstance(down, ScaledWeight) else None
    added_to, adapted = added_rows(numbers, adapters), adapters is not None
    at_once = codes if not adapted and of_tile % second.block_k == 0 else None
    middle = _middle(x, len(order), of_down.columns, of_tile, at_once)
    parts = _Rows(torch.empty((len(order), of_down.rows), dtype=x.dtype, device=x.device))
    of_gate_up, of_down_bias = biases or (None, None)
    shared = (order, tiles, weights, numbers.shape[1], overlap, activation)
    _launch_tiles(*shared, rows, w, of_gate_up, middle, first, True, *added_to(x, middle.values, True), adapted)
    more = added_to(middle.values, parts.values, False)
    if isinstance(down, ScaledWeight) and middle.scales is None:
        middle = _Rows(*quantize_rows(middle.values, down.codes.dtype, down.block[1]), _group_of(down))
    _launch_tiles(*shared, middle, of_down, of_down_bias, parts, second, False, *more, adapted)
    sum_choices(parts.values, out, numbers, len(of_down.codes), overlap, partial)


def _grouped(x: Tensor, gate_up: ExpertsWeight, numbers: Tensor, tile: int) -> tuple[Tensor, Tensor, _Rows]:
    """Return the pairs and tiles that group_by_expert makes, and x as the first product takes it."""
    experts = len(_arguments(gate_up).codes)
    if not isinstance(gate_up, ScaledWeight):
        return *group_by_expert(numbers, experts, tile), _Rows(x)
    codes, block = gate_up.codes.dtype, gate_up.block[1]
    if len(x) <= _QUANTIZED_BESIDE:
        order, tiles, rows = group_and_quantize(numbers, experts, tile, x, codes, block)
    else:
        rows = quantize_rows(x, codes, block)
        order, tiles = group_by_expert(numbers, experts, tile)
    return order, tiles, _Rows(*rows, _group_of(gate_up))


def _middle(x: Tensor, pairs: int, width: int, of_tile: int, codes: torch.dtype | None) -> _Rows:
    """Allocate the result of the first product, as codes or in the dtype of x."""
    values = torch.empty((pairs, width), dtype=codes or x.dtype, device=x.device)
    if codes is None:
        return _Rows(values)
    return _Rows(values, torch.empty((pairs, cdiv(width, of_tile)), dtype=torch.float32, device=x.device), of_tile)


def _arguments(weight: ExpertsWeight) -> CodedArguments:
    """Return the kernels' arguments for a weight of any form; in a group of 0 columns, a whole row shares a scale."""
    if isinstance(weight, Tensor):
        _, rows, columns = weight.shape
        return CodedArguments(weight, None, None, None, None, rows, columns, facts_of(16, 0))
    if isinstance(weight, ScaledWeight):
        (_, rows, columns), facts = weight.codes.shape, facts_of(8, _group_of(weight))
        return CodedArguments(weight.codes, weight.scales, None, None, None, rows, columns, facts, weight.block[0])
    return coded_arguments(weight)


def sum_choices(parts: Tensor, out: Tensor, numbers: Tensor, experts: int, overlap: bool, partial: bool) -> None:
    """Write the sum of each token's rows of parts [tokens · chosen, hidden] to out [tokens, hidden].

    Args:
        parts, out: The rows and their sums.
        numbers: [tokens, chosen], the experts that made the rows.
        experts: The number of experts on this rank.
        overlap, partial: As in `gemv_by_pair`.
    """
    tokens, hidden = out.shape
    _sum_kernel[(tokens, -(-hidden // _SUM_BLOCK))](
        parts, out, numbers, hidden, experts,
        CHOSEN=numbers.shape[1], BLOCK=_SUM_BLOCK, PARTIAL=partial, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip


def _launch_tiles(
    order: Tensor, tiles: Tensor, weights: Tensor, chosen: int, overlap: bool, activation: Activation, x: _Rows,
    w: CodedArguments, biases: Tensor | None, y: _Rows, config: GemmConfig, first: bool, added: Tensor, slots: Tensor,
    adapted: bool,
) -> None:  # fmt: skip
    places, made = tiles.shape[1], y.values.shape[1]
    across = cdiv(made, config.block_n // 2 if first else config.block_n)
    _tile_kernel[(across * places,)](
        x.values, x.scales, w.codes, w.scales, w.zeros, w.factors, w.table, biases, order, tiles, weights, added, slots,
        y.values, y.scales, places, made, w.columns, LARGEST.get(y.values.dtype, 1.0), SMALLEST, CHOSEN=chosen,
        **constants_of(activation), BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        X_GROUP=x.group, **w.facts, SCALE_ROWS=w.scale_rows, WHOLE=w.columns % config.block_k == 0,
        SWAPPED=config.swapped, FAST=config.block_m >= _MANY, FIRST=first, ADAPTED=adapted, OVERLAP=overlap,
        num_warps=config.warps, num_stages=config.stages, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize=["pairs", "experts"], do_not_specialize_on_alignment=["slots"])
def _pair_kernel(
    x, w, scales, biases, numbers, added, slots, y, pairs, width, experts, CHOSEN: tl.constexpr, KIND: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SCALE_ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    PARTIAL: tl.constexpr, ADAPTED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write y [pairs, width], the activation of gates and ups.

    Pairs that share an expert read the same rows at about the same time.
    """
    pair = tl.program_id(0) % pairs
    begin = tl.program_id(0) // pairs * (BLOCK_N // 2)
    wait_for_inputs(OVERLAP)
    release_dependents(OVERLAP)  # not before, so that the next kernel may read the experts' numbers without waiting
    expert = tl.load(numbers + pair).to(tl.int64)
    if not PARTIAL or expert < experts:
        _multiply_pair(
            x, w, scales, biases, added, slots, y, expert, pair, begin, width,
            CHOSEN, KIND, ALPHA, LIMIT, COLUMNS, BLOCK_N, BLOCK_K, SCALE_ROWS, GROUPS, GROUP, ADAPTED,
        )  # fmt: skip


@triton.jit
def _multiply_pair(
    x, w, scales, biases, added, slots, y, expert, pair, begin, width, CHOSEN: tl.constexpr, KIND: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SCALE_ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    ADAPTED: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a pair, starting at `begin`."""
    MADE: tl.constexpr = BLOCK_N // 2
    rows = weight_rows(begin, width, BLOCK_N, True)
    own = x + (pair // CHOSEN).to(tl.int64) * COLUMNS
    of_expert = rows + expert * (2 * width)
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if scales is None:
        values = tl.sum(gemv_loop(sums, own, w, of_expert, COLUMNS, BLOCK_K, False), 1)
    else:
        scales += (expert * tl.cdiv(2 * width, SCALE_ROWS) + rows // SCALE_ROWS) * GROUPS
        values = tl.sum(gemv_loop(sums, own, w, of_expert, COLUMNS, BLOCK_K, False, scales, GROUP), 1)
        if GROUP == 0:
            values *= tl.load(scales)
    one = pair.to(tl.int64) + tl.arange(0, 1)
    of_bias = None if biases is None else biases + expert * 2 * width
    values = finished(
        values[None, :], added, slots, y, of_bias, one, one >= 0, begin, width,
        1, MADE, 1, CHOSEN, True, ADAPTED, KIND, ALPHA, LIMIT,
    )  # fmt: skip
    values = tl.reshape(values, (MADE,))
    n = begin + tl.arange(0, MADE)
    tl.store(y + pair.to(tl.int64) * width + n, values.to(y.dtype.element_ty), n < width)


@fast_launch
@triton.jit(do_not_specialize=["tokens", "experts"], do_not_specialize_on_alignment=["slots"])
def _token_kernel(
    x, w, scales, biases, numbers, weights, added, slots, y, tokens, hidden, experts, CHOSEN: tl.constexpr,
    SLOTS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SCALE_ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, PARTIAL: tl.constexpr, ADAPTED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write y [tokens, hidden]: the weighted sum of each token's experts on its rows of x [pairs, COLUMNS]."""
    release_dependents(OVERLAP)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    begin = tl.program_id(0) // tokens * BLOCK_N
    rows = weight_rows(begin, hidden, BLOCK_N, False)
    choice = tl.arange(0, SLOTS)
    there = choice < CHOSEN
    pair = token * CHOSEN + choice
    if PARTIAL:  # which of the experts is the first one here is not known
        wait_for_inputs(OVERLAP)
    expert = tl.load(numbers + pair, there, 0, cache_modifier=".cg").to(tl.int64)
    if PARTIAL:
        there &= expert < experts
        expert = tl.where(there, expert, 0)
    of_rows = rows[:, None] + expert[None, :] * hidden
    k = tl.arange(0, BLOCK_K)
    WHOLE: tl.constexpr = COLUMNS % BLOCK_K == 0 and SLOTS == CHOSEN and not PARTIAL
    x_pointers = x + pair[:, None] * COLUMNS + k[None, :]
    w_pointers = w + of_rows[:, :, None] * COLUMNS + k[None, None, :]
    inside = there[:, None] & (k < COLUMNS)[None, :]
    if WHOLE:
        w_ahead = tl.load(w_pointers, eviction_policy="evict_first")
    else:
        w_ahead = tl.load(w_pointers, inside[None, :, :], 0.0, eviction_policy="evict_first")
    if not PARTIAL:
        wait_for_inputs(OVERLAP)
    weight = tl.load(weights + pair, there, 0.0, cache_modifier=".cg").to(tl.float32)
    x_ahead = tl.load(x_pointers) if WHOLE else tl.load(x_pointers, inside, 0.0)
    sums = tl.zeros((BLOCK_N, SLOTS, BLOCK_K), tl.float32)
    for column in tl.static_range(0, COLUMNS, BLOCK_K):
        part, values = w_ahead, x_ahead
        if column + BLOCK_K < COLUMNS:
            x_pointers += BLOCK_K
            w_pointers += BLOCK_K
            if WHOLE:
                w_ahead = tl.load(w_pointers, eviction_policy="evict_first")
                x_ahead = tl.load(x_pointers)
            else:
                inside = there[:, None] & (column + BLOCK_K + k < COLUMNS)[None, :]
                w_ahead = tl.load(w_pointers, inside[None, :, :], 0.0, eviction_policy="evict_first")
                x_ahead = tl.load(x_pointers, inside, 0.0)
        products = part.to(tl.float32) * values.to(tl.float32)[None, :, :]
        if GROUP > 0:
            of_w = _scales_at(scales, expert, rows, hidden, SCALE_ROWS, GROUPS)
            products = scaled_by_group(products, of_w, column, COLUMNS, (BLOCK_N, SLOTS, BLOCK_K // GROUP, GROUP))
        sums += products
    of_pairs = tl.sum(sums, 2)
    if scales is not None and GROUP == 0:
        of_pairs *= tl.load(_scales_at(scales, expert, rows, hidden, SCALE_ROWS, GROUPS))
    if biases is not None:
        of_pairs += tl.load(biases + of_rows).to(tl.float32)
    of_pairs *= weight[None, :]
    n = begin + tl.arange(0, BLOCK_N)
    total = tl.sum(of_pairs, 1)
    if ADAPTED:
        total += _added_to_token(added, slots, numbers, weights, token, n, hidden, experts, CHOSEN, BLOCK_N)
    tl.store(y + token * hidden + n, total.to(y.dtype.element_ty), n < hidden)


@triton.jit
def _scales_at(scales, expert, rows, outputs, SCALE_ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Return [rows, experts], where the scales of these rows of the experts' weights begin."""
    return scales + (expert[None, :] * tl.cdiv(outputs, SCALE_ROWS) + (rows // SCALE_ROWS)[:, None]) * GROUPS


@triton.jit
def _added_to_token(
    added, slots, numbers, weights, token, n, hidden, experts, CHOSEN: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return what a token's adapter adds to the outputs n [BLOCK_N], weighted by the router."""
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
    x, x_scales, w, scales, zeros, factors, table, biases, order, tiles, weights, added, slots, y, y_scales,
    places, made, columns, largest, smallest,
    CHOSEN: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, X_GROUP: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, MIDDLE: tl.constexpr, ZEROS: tl.constexpr,
    EXPONENTS: tl.constexpr, FACTORS: tl.constexpr, VALUES: tl.constexpr,
    WHOLE: tl.constexpr, SWAPPED: tl.constexpr, FAST: tl.constexpr, FIRST: tl.constexpr, ADAPTED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write y [pairs, made]: the product of each pair's row of x and its expert's weight.

    If FIRST, the pairs of a token share one row of x, and the weight is a gate and an up; otherwise each pair has its
    own row, and the router's weight scales the result. If ADAPTED, adapters add to the rows of their tokens. An
    expert's last tile may have few pairs; where tiles are large and operations are the limit, it is computed in half
    the size if possible. A weight without scales is dense. Codes are expanded where x has no scales (see
    CodedArguments).
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
        expert = tl.load(tiles + place, cache_modifier=".cg").to(tl.int64)
        outputs = made * 2 if FIRST else made
        stored = columns // 2 if BITS == 4 else columns
        rows = weight_rows(begin, made, BLOCK_N, FIRST, 1 if SWAPPED else 8)
        of_w = w + expert * outputs * stored
        before = expert * tl.cdiv(outputs, SCALE_ROWS) * (tl.cdiv(columns, GROUP) if GROUP > 0 else 1)
        of_scales = None if scales is None else scales + before
        of_zeros = None if zeros is None else zeros + before
        of_factors = None if factors is None else factors + expert * outputs
        of_biases = None if biases is None else biases + expert * outputs
        if not FIRST and OVERLAP:
            fetch_ahead(of_w, rows * stored, 0, stored, BLOCK_N, 2 * BLOCK_K)
            wait_for_inputs(OVERLAP)
        if BLOCK_M > 64 and to_pair - from_pair <= BLOCK_M // 2:
            _multiply(
                x, x_scales, of_w, of_scales, of_zeros, of_factors, table, of_biases, order, weights, added, slots,
                y, y_scales, from_pair, to_pair, begin, made, columns, rows, largest, smallest,
                CHOSEN, KIND, ALPHA, LIMIT, BLOCK_M // 2, BLOCK_N, BLOCK_K, X_GROUP,
                BITS, GROUP, SCALE_ROWS, MIDDLE, ZEROS, EXPONENTS, FACTORS, VALUES,
                WHOLE, SWAPPED, FAST, FIRST, ADAPTED,
            )  # fmt: skip
        else:
            _multiply(
                x, x_scales, of_w, of_scales, of_zeros, of_factors, table, of_biases, order, weights, added, slots,
                y, y_scales, from_pair, to_pair, begin, made, columns, rows, largest, smallest,
                CHOSEN, KIND, ALPHA, LIMIT, BLOCK_M, BLOCK_N, BLOCK_K, X_GROUP,
                BITS, GROUP, SCALE_ROWS, MIDDLE, ZEROS, EXPONENTS, FACTORS, VALUES,
                WHOLE, SWAPPED, FAST, FIRST, ADAPTED,
            )  # fmt: skip


@triton.jit
def _multiply(
    x, x_scales, w, scales, zeros, factors, table, biases, order, weights, added, slots, y, y_scales,
    from_pair, to_pair, begin, made, columns, rows, largest, smallest,
    CHOSEN: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, X_GROUP: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, MIDDLE: tl.constexpr, ZEROS: tl.constexpr,
    EXPONENTS: tl.constexpr, FACTORS: tl.constexpr, VALUES: tl.constexpr,
    WHOLE: tl.constexpr, SWAPPED: tl.constexpr, FAST: tl.constexpr, FIRST: tl.constexpr, ADAPTED: tl.constexpr,
):  # fmt: skip
    """Compute a tile of at most BLOCK_M pairs by `rows` of an expert's weight, for the outputs from `begin` on."""
    MADE: tl.constexpr = BLOCK_N // 2 if FIRST else BLOCK_N
    m = from_pair + tl.arange(0, BLOCK_M)
    there = m < to_pair
    pair = tl.load(order + m, there, 0, cache_modifier=".cg").to(tl.int64)
    own = pair // CHOSEN if FIRST else pair
    if zeros is not None:
        values = coded_loop(
            x, own * columns, there, w, scales, zeros, factors, table, rows, columns,
            BLOCK_M, BLOCK_N, BLOCK_K, BITS, GROUP, MIDDLE, ZEROS, EXPONENTS, FACTORS, VALUES,
        )  # fmt: skip
    elif scales is not None:
        of_x = x_scales + own * (tl.cdiv(columns, X_GROUP) if X_GROUP > 0 else 1)
        of_w = scales + rows // SCALE_ROWS * (tl.cdiv(columns, GROUP) if GROUP > 0 else 1)
        values = gemm_loop(
            x, own * columns, there, w, rows * columns, columns, 0, tl.cdiv(columns, BLOCK_K),
            BLOCK_M, BLOCK_N, BLOCK_K, WHOLE, SWAPPED, of_x, of_w, X_GROUP, GROUP, FAST,
        )  # fmt: skip
        if X_GROUP == 0:
            values *= tl.load(of_x, there, 0.0)[:, None]
        if GROUP == 0:
            values *= tl.load(of_w)[None, :]
    else:
        values = gemm_loop(
            x, own * columns, there, w, rows * columns, columns, 0, tl.cdiv(columns, BLOCK_K),
            BLOCK_M, BLOCK_N, BLOCK_K, WHOLE, SWAPPED,
        )  # fmt: skip
    values = finished(
        values, added, slots, weights, biases, pair, there, begin, made,
        BLOCK_M, MADE, 1 if SWAPPED else 8, CHOSEN, FIRST, ADAPTED, KIND, ALPHA, LIMIT,
    )  # fmt: skip
    if y_scales is not None:
        scale, shrink = row_scales(values, largest, smallest, 1)
        tl.store(y_scales + pair * tl.cdiv(made, MADE) + begin // MADE, scale, there)
        values *= shrink[:, None]
    n = begin + tl.arange(0, MADE)
    inside = there[:, None] & (n < made)[None, :]
    tl.store(y + pair[:, None] * made + n[None, :], to_codes(values, y.dtype.element_ty), inside)


@triton.jit
def finished(
    values, added, slots, weights, biases, pair, there, begin, made, ROWS: tl.constexpr, MADE: tl.constexpr,
    RUN: tl.constexpr, CHOSEN: tl.constexpr, FIRST: tl.constexpr, ADAPTED: tl.constexpr, KIND: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Return a product's results [ROWS, MADE] for the outputs from `begin` on, gated or scaled.

    Args:
        values: The sums [ROWS, MADE]; if FIRST, [ROWS, 2 · MADE] with RUN gates before their ups.
        added, slots: What adapters add to their rows, and the slot of each token's adapter.
        weights: The router's weights, which scale the sums; if FIRST, the sums are gated instead.
        biases: The expert's biases, [made], if FIRST [2 · made]; None: it has none.
        pair, there: [ROWS], each row's pair, int64, and whether there is one.
    """
    if ADAPTED:
        n = begin + tl.arange(0, MADE)
        adapted = there & (tl.load(slots + pair // CHOSEN, there, 0) > 0)
        inside = adapted[:, None] & (n < made)[None, :]
        added += pair[:, None] * (2 * made if FIRST else made) + n[None, :]
    if FIRST:
        gate, up = gates_and_ups(values, ROWS, MADE, RUN)
        if biases is not None:
            of_gates = biases + begin + tl.arange(0, MADE)
            exists = begin + tl.arange(0, MADE) < made
            gate += tl.load(of_gates, exists, 0.0).to(tl.float32)[None, :]
            up += tl.load(of_gates + made, exists, 0.0).to(tl.float32)[None, :]
        if ADAPTED:
            gate += tl.load(added, inside, 0.0).to(tl.float32)
            up += tl.load(added + made, inside, 0.0).to(tl.float32)
        values = activated(gate, up, KIND, ALPHA, LIMIT)
    else:
        if biases is not None:
            m = begin + tl.arange(0, MADE)
            values += tl.load(biases + m, m < made, 0.0).to(tl.float32)[None, :]
        if ADAPTED:
            values += tl.load(added, inside, 0.0).to(tl.float32)
        values *= tl.load(weights + pair).to(tl.float32)[:, None]
    return values


def constants_of(activation: Activation) -> dict[str, str | float]:
    """Return the constants that kernels are compiled for; a limit of 0 stands for none.

    Raises:
        NotImplementedError: Experts have no gates.
    """
    if activation.products == 1:
        raise NotImplementedError("Experts without gates run on a CPU only.")
    return {"KIND": activation.kind, "ALPHA": activation.alpha, "LIMIT": activation.limit or 0.0}


@triton.jit
def activated(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return the activation of gates and ups, as kernels/activations.py has it."""
    if LIMIT > 0:
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        if KIND != "silu":
            gate = tl.minimum(gate, LIMIT)
    if KIND == "silu" and LIMIT > 0:
        values = tl.minimum(gate * tl.sigmoid(gate), LIMIT) * up
    elif KIND == "swigluoai":
        values = gate * tl.sigmoid(ALPHA * gate) * (up + 1.0)
    elif KIND == "gelu":  # (1 + tanh(x)) / 2 is σ(2 x)
        values = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        values = silu_times(gate, up)
    return values


@fast_launch
@triton.jit(do_not_specialize=["experts"])
def _sum_kernel(
    parts, out, numbers, hidden, experts, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PARTIAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the sum of each token's CHOSEN rows of parts to out [tokens, hidden]."""
    release_dependents(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < hidden
    wait_for_inputs(OVERLAP)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOSEN):
        pair = token * CHOSEN + choice
        if not PARTIAL or tl.load(numbers + pair) < experts:
            total += tl.load(parts + pair * hidden + n, inside, 0.0).to(tl.float32)
    tl.store(out + token * hidden + n, total.to(out.dtype.element_ty), inside)
