"""Computes a mixture of experts on a GPU, in CUDA graphs for any number of tokens: launches do not depend on routing.

Tables of measured choices in `configs/`, written by tuning/h200/tune_experts.py, say which kernels serve how many
tokens of a mixture. A mixture that was not measured uses the choices of the nearest measured one, at the number of
tokens that gives an expert as many.

Each value of a coded weight takes 0.5 to 1 byte of reads. fp8 and int8 are multiplied by 8-bit activations, except for
few tokens of fp8, whose activations stay dense. Other codes are expanded as they are multiplied.
"""

from __future__ import annotations

import functools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.compute.kernels.activations import SILU, Activation
from quire.compute.kernels.reference.experts import Coded, ExpertAdapters, ExpertBiases
from quire.compute.kernels.reference.linear import CodebookWeight, ScaledWeight
from quire.compute.kernels.triton.experts import routing
from quire.compute.kernels.triton.experts.expert_gemms import (
    ExpertConfigs,
    ExpertsWeight,
    Table,
    gemm_by_expert,
    gemv_by_pair,
)
from quire.compute.kernels.triton.experts.mxfp4_by_pair import mxfp4_by_pair, serves_by_pair
from quire.compute.kernels.triton.experts.mxfp4_few import FewConfig, mxfp4_few
from quire.compute.kernels.triton.experts.mxfp4_layout import PackedExperts, can_be_packed, pack_mxfp4
from quire.compute.kernels.triton.experts.mxfp4_many import ManyConfig, mxfp4_many
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap
from quire.compute.kernels.triton.launching.device_properties import is_sm_90, program_memory
from quire.compute.kernels.triton.linear.coded_gemm import coded_arguments, is_mxfp4
from quire.compute.kernels.triton.linear.gemm import GemmConfig
from quire.compute.kernels.triton.linear.gemv import GemvConfig

IN_FP32 = (GemmConfig(16, 32, 32, 1, 4, 3, False), GemmConfig(16, 32, 32, 1, 4, 3, False))
"""Configs for fp32; they are not fast, because the tensor cores have no fp32."""
EXPANDED = (
    (0.5, GemmConfig(16, 64, 128, 1, 8, 3, True)),
    (8, GemmConfig(16, 128, 64, 1, 4, 3, True)),
    (32, GemmConfig(32, 64, 64, 1, 4, 3, True)),
    (float("inf"), GemmConfig(64, 64, 64, 1, 4, 3, True)),
)
"""Configs for codes that are expanded, with the maximum average number of pairs for each expert. The first two were
measured on an NVIDIA H200."""
MXFP4_BY_PAIR_UP_TO = 2
"""The most tokens for which mxfp4 is multiplied pair by pair."""
MXFP4_BY_PAIR = (GemvConfig(8, 512, 4), GemvConfig(4, 512, 4))
MXFP4 = (
    (2, GemmConfig(16, 128, 128, 1, 4, 3, True)),
    (24, GemmConfig(32, 64, 64, 1, 4, 3, True)),
    (256, GemmConfig(64, 128, 64, 1, 4, 3, True)),
    (float("inf"), GemmConfig(256, 128, 64, 1, 8, 3, True)),
)
"""Configs for mxfp4, measured on an NVIDIA H200, with the maximum average number of pairs for each expert."""
PackedConfigs = tuple[FewConfig, FewConfig] | tuple[ManyConfig, ManyConfig]
PACKED_IN_PAIRS = (FewConfig(0, 8, 2, 1), FewConfig(0, 15, 4, 1))
"""Configs for packed mxfp4 and a few tokens without adapters, up to MXFP4_BY_PAIR_UP_TO."""
PACKED: tuple[tuple[float, PackedConfigs], ...] = (
    (3, (FewConfig(8, 6, 4, 1),) * 2),
    (6, (ManyConfig(16, 1, 3),) * 2),
    (24, (ManyConfig(32, 1, 2),) * 2),
    (40, (ManyConfig(64, 1, 2),) * 2),
    (400, (ManyConfig(128, 2, 3),) * 2),
    (float("inf"), (ManyConfig(256, 2, 3),) * 2),
)
"""Configs for packed mxfp4, measured on an NVIDIA H200, with the maximum average number of pairs for each expert."""
HOPPER = 227 * 1024
"""The shared memory of a program that MXFP4's configs were chosen for."""
_CONFIGS = Path(__file__).parent / "configs" / "device_name=NVIDIA_H200.json"
_LARGEST_BLOCKED = 128
"""The maximum rows of a weight in a tile whose sums are scaled at each step; more would take too many registers."""

route, add_gated = routing.route, routing.add_gated


def pack_experts(weights: Tensor) -> Tensor:
    return weights


def pack_coded_experts(stack: Coded, gated: bool, dtype: torch.dtype) -> Coded | PackedExperts:
    """Implement reference/experts.py's op: mxfp4 is packed on Hopper for products in bf16."""
    if not (isinstance(stack, CodebookWeight) and is_mxfp4(stack) and can_be_packed(stack)):
        return stack
    return pack_mxfp4(stack, gated) if dtype == torch.bfloat16 and is_sm_90(stack.packed.device) else stack


def experts(
    x: Tensor,
    gate_up: ExpertsWeight | PackedExperts,
    down: ExpertsWeight | PackedExperts,
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    others: int = 0,
    adapters: ExpertAdapters | None = None,
    activation: Activation = SILU,
    biases: ExpertBiases | None = None,
) -> None:
    """Implement reference/experts.py's `experts` for dense or coded weights.

    Dense weights and all other tensors are contiguous, and the numbers are int32.
    """
    assert all(t.is_contiguous() for t in (x, gate_up, down, numbers, weights, out) if isinstance(t, Tensor))
    if not len(x):
        return
    if isinstance(gate_up, PackedExperts):
        assert isinstance(down, PackedExperts)
        _packed_experts(x, gate_up, down, numbers, weights, out, others, adapters, activation, biases)
        return
    assert not isinstance(down, PackedExperts)
    configs = _configs_for(x, gate_up, down, numbers, others, adapters is not None)
    overlap = can_overlap(x.device)
    experts_with_configs(
        x, gate_up, down, numbers, weights, out, configs, overlap=overlap, others=others, adapters=adapters,
        activation=activation, biases=biases,
    )  # fmt: skip


coded_experts = adapted_experts = adapted_coded_experts = experts
"""Ops of the table that this function serves too."""


def _packed_experts(
    x: Tensor, gate_up: PackedExperts, down: PackedExperts, numbers: Tensor, weights: Tensor, out: Tensor, others: int,
    adapters: ExpertAdapters | None, activation: Activation, biases: ExpertBiases | None,
) -> None:  # fmt: skip
    configs = packed_configs(len(x), numbers.shape[1], len(down.words) + others, adapters is not None)
    terms = can_overlap(x.device), others > 0, adapters, activation, biases
    if isinstance(configs[0], FewConfig):
        mxfp4_few(x, gate_up, down, numbers, weights, out, configs, *terms)
    else:
        mxfp4_many(x, gate_up, down, numbers, weights, out, configs, *terms)


def packed_configs(tokens: int, chosen: int, count: int, adapted: bool) -> PackedConfigs:
    """Return the configs of packed mxfp4 for this many tokens, each with `chosen` of `count` experts."""
    if tokens <= MXFP4_BY_PAIR_UP_TO and not adapted and PACKED_IN_PAIRS[1].warps % chosen == 0:
        return PACKED_IN_PAIRS
    return next(configs for most, configs in PACKED if tokens * chosen <= most * count)


def experts_with_configs(
    x: Tensor,
    gate_up: ExpertsWeight,
    down: ExpertsWeight,
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    configs: ExpertConfigs,
    *,
    overlap: bool,
    others: int = 0,
    adapters: ExpertAdapters | None = None,
    activation: Activation = SILU,
    biases: ExpertBiases | None = None,
) -> None:
    """Compute `experts` with these configs; `overlap` as in dependent_launch."""
    terms = adapters, activation, biases
    if isinstance(configs[0], GemvConfig) and serves_by_pair(gate_up):
        assert adapters is None and isinstance(gate_up, CodebookWeight) and isinstance(down, CodebookWeight)
        mxfp4_by_pair(
            x, gate_up, down, numbers, weights, out, configs, overlap, others > 0, activation, biases
        )  # fmt: skip
    elif isinstance(configs[0], GemvConfig):
        assert isinstance(gate_up, Tensor | ScaledWeight) and isinstance(down, Tensor | ScaledWeight)
        gemv_by_pair(x, gate_up, down, numbers, weights, out, configs, overlap, others > 0, *terms)
    else:
        gemm_by_expert(x, gate_up, down, numbers, weights, out, configs, overlap, others > 0, *terms)


def _configs_for(
    x: Tensor, gate_up: ExpertsWeight, down: ExpertsWeight, numbers: Tensor, others: int, adapted: bool
) -> ExpertConfigs:
    memory, chosen = program_memory(x.device), numbers.shape[1]
    if isinstance(down, Tensor):
        count, hidden, width = down.shape
        return (
            IN_FP32
            if x.dtype == torch.float32
            else tuned_config((count + others, chosen, hidden, width), len(x), memory)
        )
    if isinstance(down, ScaledWeight):
        assert isinstance(gate_up, ScaledWeight)
        count, hidden, width = down.codes.shape
        block = next((weight.block[1] for weight in (gate_up, down) if weight.scales.shape[2] > 1), None)
        return scaled_configs((count + others, chosen, hidden, width), len(x), down.codes.dtype, block, memory)
    count = len(coded_arguments(down).codes) + others
    if serves_by_pair(down) and len(x) <= MXFP4_BY_PAIR_UP_TO and not adapted:
        return MXFP4_BY_PAIR
    table = MXFP4 if serves_by_pair(down) and x.dtype == torch.bfloat16 and memory >= HOPPER else EXPANDED
    return next((config,) * 2 for most, config in table if numbers.numel() <= most * count)


@functools.cache
def measured_configs(weights: str) -> Table:
    """Return the table for "16-bit" or "8-bit" weights, read once."""
    tables = json.loads(_CONFIGS.read_bytes())

    def config(kernel: str, **fields: Any) -> GemvConfig | GemmConfig:
        return GemvConfig(**fields) if kernel == "gemv" else GemmConfig(**fields)

    table: dict[Any, Any] = {
        tuple(map(int, re.findall(r"\d+", mixture))): tuple(
            (float(most), tuple(config(**each) for each in pair)) for most, pair in rows.items()
        )
        for mixture, rows in tables[weights].items()
    }
    return table


@functools.cache
def tuned_config(mixture: tuple[int, int, int, int], tokens: int, memory: int) -> ExpertConfigs:
    """Return the configs for a mixture (experts, chosen, hidden, width) of 16-bit weights and this many tokens.

    Tiles that need more than the `memory` of a program are replaced by the next smaller ones.
    """
    return nearest_configs(measured_configs("16-bit"), mixture, tokens, memory)


@functools.cache
def scaled_configs(
    mixture: tuple[int, int, int, int], tokens: int, codes: torch.dtype, block: int | None, memory: int
) -> ExpertConfigs:
    """Return the configs for a mixture of 8-bit codes, as `tuned_config` does for 16-bit weights.

    No step of a product has more than the `block` columns that share a scale; None: all columns of a row share one.
    """
    table, in_tiles = measured_configs("8-bit"), codes == torch.int8
    first, second = nearest_configs(table, mixture, tokens, memory, item=1, in_tiles=in_tiles)
    if block is None or isinstance(first, GemvConfig) or isinstance(second, GemvConfig):
        return first, second  # type: ignore[return-value]
    longer = max(1, first.block_k // block)
    rows = min(_LARGEST_BLOCKED, first.block_n)
    first = replace(first, block_n=rows, block_k=first.block_k // longer, stages=min(6, first.stages * longer))
    return first, replace(second, block_k=min(second.block_k, block))


def nearest_configs(
    table: Table, mixture: tuple[int, int, int, int], tokens: int, memory: int, item: int = 2, in_tiles: bool = False
) -> ExpertConfigs:
    """Return the configs of the table's nearest mixture, for values of `item` bytes; `in_tiles` excludes GemvConfig."""

    def distance(measured: tuple[int, int, int, int]) -> float:
        return sum(abs(math.log(ours / theirs)) for ours, theirs in zip(mixture, measured, strict=True))

    nearest = min(table, key=distance)
    experts, chosen, *_ = mixture
    alike = tokens * (chosen / experts) / (nearest[1] / nearest[0])
    fitting = [
        (most, configs)
        for most, configs in table[nearest]
        if all(_bytes_of(config, item) <= memory for config in configs)
        and not (in_tiles and isinstance(configs[0], GemvConfig))
    ]
    return next((configs for most, configs in fitting if alike <= most), fitting[-1][1])


def _bytes_of(config: GemvConfig | GemmConfig, item: int) -> int:
    """Return the shared memory of a program before Hopper; Hopper, where tables were measured, has enough for all."""
    if isinstance(config, GemvConfig):
        return 0
    return (config.block_m + config.block_n) * config.block_k * item * (config.stages - 1)
