"""A mixture of experts on a GPU, captured in graphs at any number of tokens: no launch depends on where tokens go.

The configs of products are a table of measured choices, `tuned_expert_configs`; a mixture that was not measured is
served like the measured one nearest to it, at the number of tokens that gives an expert as many.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from quire.compute.kernels.reference.expert_adapters import ExpertAdapters
from quire.compute.kernels.reference.scaled_linear import ScaledWeight
from quire.compute.kernels.triton.experts import routing
from quire.compute.kernels.triton.experts.expert_gemms import (
    ExpertConfigs,
    ExpertsWeight,
    Table,
    gemm_by_expert,
    gemv_by_pair,
)
from quire.compute.kernels.triton.experts.tuned_expert_configs import CONFIGS, OVERLAP
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap
from quire.compute.kernels.triton.launching.device_properties import program_memory
from quire.compute.kernels.triton.linear.gemm import GemmConfig
from quire.compute.kernels.triton.linear.gemv import GemvConfig

IN_FP32 = (GemmConfig(16, 32, 32, 1, 4, 3, False), GemmConfig(16, 32, 32, 1, 4, 3, False))
"""Tensor cores have no fp32: this is for correctness."""

route = routing.route


def pack_experts(weights: Tensor) -> Tensor:
    """The weights [experts, rows, columns] as `experts` wants them: as they are."""
    return weights


def experts(
    x: Tensor, gate_up: Tensor, down: Tensor, numbers: Tensor, weights: Tensor, out: Tensor, others: int = 0
) -> None:
    """Arguments as in reference/experts.py; all are contiguous, the weights as `pack_experts` gives them and the
    numbers int32."""
    adapted_experts(x, gate_up, down, numbers, weights, out, others, None)


def adapted_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    others: int,
    adapters: ExpertAdapters | None,
) -> None:
    """Arguments as in reference/experts.py, and as of `experts`."""
    assert all(tensor.is_contiguous() for tensor in (x, gate_up, down, numbers, weights, out))
    if not len(x):
        return
    half = x.dtype != torch.float32
    mixture = (len(down) + others, numbers.shape[1], down.shape[1], down.shape[2])
    configs = tuned_config(mixture, len(x), program_memory(x.device)) if half else IN_FP32
    overlap = OVERLAP and can_overlap(x.device)
    experts_with_configs(
        x, gate_up, down, numbers, weights, out, configs, overlap=overlap, others=others, adapters=adapters
    )


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
) -> None:
    """`adapted_experts` or `adapted_coded_experts`, or without adapters `experts` or `coded_experts`, with these
    configs; `overlap`: see dependent_launch."""
    if isinstance(configs[0], GemvConfig):
        assert isinstance(gate_up, Tensor | ScaledWeight) and isinstance(down, Tensor | ScaledWeight)
        gemv_by_pair(x, gate_up, down, numbers, weights, out, configs, overlap, others > 0, adapters)
    else:
        gemm_by_expert(x, gate_up, down, numbers, weights, out, configs, overlap, others > 0, adapters)


@functools.cache
def tuned_config(mixture: tuple[int, int, int, int], tokens: int, memory: int) -> ExpertConfigs:
    """The configs for a mixture (experts, chosen, hidden, width) and this many tokens; of tiles that are larger than a
    program's shared memory, the next smaller ones."""
    return nearest_configs(CONFIGS, mixture, tokens, memory)


def nearest_configs(
    table: Table, mixture: tuple[int, int, int, int], tokens: int, memory: int, item: int = 2, in_tiles: bool = False
) -> ExpertConfigs:
    """`tuned_config`, of a table, for values of `item` bytes; `in_tiles`: only such as multiply tiles."""

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
    """Of shared memory, on GPUs before Hopper; for that tables were measured, and it has as much as is asked for."""
    if isinstance(config, GemvConfig):
        return 0
    return (config.block_m + config.block_n) * config.block_k * item * (config.stages - 1)
