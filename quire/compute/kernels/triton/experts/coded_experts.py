"""The products of a mixture of experts whose weights are codes with scales, expanded as they are multiplied.

Pairs of token and choice stand in the order of experts (see routing.py), and a program multiplies a tile of one
expert's pairs with a tile of its weight, as `gemm_by_expert` does; of the weights that tokens go to, 0.5 to 1 byte each
is read, once for each tile of an expert's pairs. Launches do not depend on where tokens go, so graphs capture them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.reference.expert_adapters import ExpertAdapters
from quire.compute.kernels.triton.experts.expert_adapters import AddedRows
from quire.compute.kernels.triton.experts.expert_gemms import added_to, finished, sum_choices
from quire.compute.kernels.triton.experts.routing import group_by_expert
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap, release_dependents, wait_for_inputs
from quire.compute.kernels.triton.launching.launch import fast_launch
from quire.compute.kernels.triton.linear.coded_gemm import CodedConfig
from quire.compute.kernels.triton.linear.coded_loop import AnyCoded, CodedArguments, coded_arguments, coded_loop
from quire.compute.kernels.triton.linear.inner_loops import weight_rows

CONFIGS = (
    (0.5, CodedConfig(16, 64, 128, 8, 3)),
    (8, CodedConfig(16, 128, 64, 4, 3)),
    (32, CodedConfig(32, 64, 64, 4, 3)),
    (float("inf"), CodedConfig(64, 64, 64, 4, 3)),
)
"""Up to how many pairs an expert has on average. The first two were measured on an NVIDIA H200."""


def coded_experts(
    x: Tensor, gate_up: AnyCoded, down: AnyCoded, numbers: Tensor, weights: Tensor, out: Tensor, others: int = 0
) -> None:
    """Arguments as in reference/coded_experts.py; dense ones are contiguous, and the numbers int32."""
    adapted_coded_experts(x, gate_up, down, numbers, weights, out, others, None)


def adapted_coded_experts(
    x: Tensor,
    gate_up: AnyCoded,
    down: AnyCoded,
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    others: int,
    adapters: ExpertAdapters | None,
) -> None:
    """Arguments as in reference/coded_experts.py, and as of `coded_experts`."""
    if not len(x):
        return
    count = len(coded_arguments(down).codes) + others
    config = next(config for most, config in CONFIGS if numbers.numel() <= most * count)
    overlap = can_overlap(x.device)
    coded_experts_with_config(
        x, gate_up, down, numbers, weights, out, config, overlap=overlap, others=others, adapters=adapters
    )


def coded_experts_with_config(
    x: Tensor,
    gate_up: AnyCoded,
    down: AnyCoded,
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    config: CodedConfig,
    *,
    overlap: bool,
    others: int = 0,
    adapters: ExpertAdapters | None = None,
) -> None:
    """`adapted_coded_experts` (without adapters `coded_experts`), with this config; `overlap`: see dependent_launch."""
    assert all(tensor.is_contiguous() for tensor in (x, numbers, weights, out))
    first, second = coded_arguments(gate_up), coded_arguments(down)
    pairs, chosen = numbers.numel(), numbers.shape[1]
    order, tiles = group_by_expert(numbers, len(second.codes), config.block_m)
    middle = torch.empty((pairs, second.columns), dtype=x.dtype, device=x.device)
    parts = torch.empty((pairs, second.rows), dtype=x.dtype, device=x.device)
    added = None if adapters is None else AddedRows(numbers, adapters)
    _launch_tiles(x, first, order, tiles, weights, middle, chosen, config, True, overlap, added)
    _launch_tiles(middle, second, order, tiles, weights, parts, chosen, config, False, overlap, added)
    sum_choices(parts, out, numbers, len(second.codes), overlap, others > 0)


def _launch_tiles(
    x: Tensor,
    w: CodedArguments,
    order: Tensor,
    tiles: Tensor,
    weights: Tensor,
    y: Tensor,
    chosen: int,
    config: CodedConfig,
    first: bool,
    overlap: bool,
    adapters: AddedRows | None,
) -> None:
    places, made = tiles.shape[1], y.shape[1]
    across = -(-made // (config.block_n // 2 if first else config.block_n))
    added, slots = added_to(x, y, first, adapters)
    _coded_tile_kernel[(across * places,)](
        x, w.codes, w.scales, w.zeros, w.factors, w.table, order, tiles, weights, added, slots, y, places, made,
        w.columns, CHOSEN=chosen, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, FIRST=first,
        ADAPTED=adapters is not None, OVERLAP=overlap, **w.facts,
        num_warps=config.warps, num_stages=config.stages, launch_pdl=overlap,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize=["places"], do_not_specialize_on_alignment=["slots"])
def _coded_tile_kernel(
    x, codes, scales, zeros, factors, table, order, tiles, weights, added, slots, y, places, made, columns,
    CHOSEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FIRST: tl.constexpr,
    ADAPTED: tl.constexpr, OVERLAP: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, MIDDLE: tl.constexpr, ZEROS: tl.constexpr,
    EXPONENTS: tl.constexpr, FACTORS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """y [pairs, made], as _tile_kernel of expert_gemms.py."""
    release_dependents(OVERLAP)
    MADE: tl.constexpr = BLOCK_N // 2 if FIRST else BLOCK_N
    across = tl.cdiv(made, MADE)
    place = tl.program_id(0) // across
    begin = tl.program_id(0) % across * MADE
    wait_for_inputs(OVERLAP)
    from_pair = tl.load(tiles + places + place, cache_modifier=".cg")
    to_pair = tl.load(tiles + 2 * places + place, cache_modifier=".cg")
    if from_pair < to_pair:
        expert = tl.load(tiles + place, cache_modifier=".cg").to(tl.int64)
        w_rows = made * 2 if FIRST else made
        of_codes = expert * w_rows * (columns // 2 if BITS == 4 else columns)
        of_scales = expert * tl.cdiv(w_rows, SCALE_ROWS) * tl.cdiv(columns, GROUP)
        m = from_pair + tl.arange(0, BLOCK_M)
        pair = tl.load(order + m, m < to_pair, 0, cache_modifier=".cg").to(tl.int64)
        values = coded_loop(
            x, (pair // CHOSEN if FIRST else pair) * columns, m < to_pair,
            codes + of_codes, scales + of_scales, zeros + of_scales, factors + expert * w_rows, table,
            weight_rows(begin, made, BLOCK_N, FIRST), columns,
            BLOCK_M, BLOCK_N, BLOCK_K, BITS, GROUP, SCALE_ROWS, MIDDLE, ZEROS, EXPONENTS, FACTORS, VALUES,
        )  # fmt: skip
        values = finished(
            values, added, slots, weights, pair, m < to_pair, begin, made, BLOCK_M, MADE, CHOSEN, FIRST, ADAPTED
        )
        n = begin + tl.arange(0, MADE)
        inside = (m < to_pair)[:, None] & (n < made)[None, :]
        tl.store(y + pair[:, None] * made + n[None, :], values.to(y.dtype.element_ty), inside)
