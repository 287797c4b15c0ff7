"""A mixture of experts whose weights are codes with scales: which kernels and configs serve how many tokens.

Of the weights that tokens go to, 0.5 to 1 byte each is read. fp8 and int8 are multiplied by activations of 8 bits, but
for few tokens of fp8, whose activations stay dense; other codes are expanded as they are multiplied.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from quire.compute.kernels.reference.expert_adapters import ExpertAdapters
from quire.compute.kernels.reference.scaled_linear import ScaledWeight
from quire.compute.kernels.triton.experts.expert_gemms import ExpertConfigs, Table
from quire.compute.kernels.triton.experts.experts import experts_with_configs, nearest_configs
from quire.compute.kernels.triton.launching.dependent_launch import can_overlap
from quire.compute.kernels.triton.launching.device_properties import program_memory
from quire.compute.kernels.triton.linear.coded_loop import AnyCoded, coded_arguments
from quire.compute.kernels.triton.linear.gemm import GemmConfig
from quire.compute.kernels.triton.linear.gemv import GemvConfig

SCALED: Table = {
    (128, 8, 2048, 768): (
        (8, (GemvConfig(4, 1024, 2), GemvConfig(4, 256, 2))),
        (160, (GemmConfig(16, 64, 256, 1, 4, 5, True), GemmConfig(16, 64, 128, 1, 4, 4, True))),
        (320, (GemmConfig(32, 64, 256, 1, 4, 4, True), GemmConfig(32, 128, 128, 1, 4, 4, True))),
        (1024, (GemmConfig(64, 128, 128, 1, 4, 4, False), GemmConfig(64, 128, 128, 1, 4, 4, False))),
        (float("inf"), (GemmConfig(128, 256, 128, 1, 8, 4, False), GemmConfig(128, 128, 128, 1, 8, 4, False))),
    )
}
"""Of fp8 and int8, as tuned_expert_configs has those of 16 bits; by tuning/h200/tune_experts.py on an NVIDIA H200."""
EXPANDED = (
    (0.5, GemmConfig(16, 64, 128, 1, 8, 3, True)),
    (8, GemmConfig(16, 128, 64, 1, 4, 3, True)),
    (32, GemmConfig(32, 64, 64, 1, 4, 3, True)),
    (float("inf"), GemmConfig(64, 64, 64, 1, 4, 3, True)),
)
"""Of codes that are expanded, for up to how many pairs an expert has on average. The first two were measured on an
NVIDIA H200."""
_LARGEST_BLOCKED = 128
"""Rows of a weight, of tiles whose sums are scaled at each step: more take more registers than there are."""


def coded_experts(
    x: Tensor,
    gate_up: AnyCoded | ScaledWeight,
    down: AnyCoded | ScaledWeight,
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    others: int = 0,
) -> None:
    """Arguments as in reference/coded_experts.py; dense ones are contiguous, and the numbers int32."""
    adapted_coded_experts(x, gate_up, down, numbers, weights, out, others, None)


def adapted_coded_experts(
    x: Tensor,
    gate_up: AnyCoded | ScaledWeight,
    down: AnyCoded | ScaledWeight,
    numbers: Tensor,
    weights: Tensor,
    out: Tensor,
    others: int,
    adapters: ExpertAdapters | None,
) -> None:
    """Arguments as in reference/coded_experts.py, and as of `coded_experts`."""
    assert all(tensor.is_contiguous() for tensor in (x, numbers, weights, out))
    if not len(x):
        return
    if isinstance(down, ScaledWeight):
        mixture = (len(down.codes) + others, numbers.shape[1], *down.codes.shape[1:])
        assert isinstance(gate_up, ScaledWeight)
        block = next((weight.block[1] for weight in (gate_up, down) if weight.scales.shape[2] > 1), None)
        configs = scaled_configs(mixture, len(x), down.codes.dtype, block, program_memory(x.device))
    else:
        count = len(coded_arguments(down).codes) + others
        configs = next((config,) * 2 for most, config in EXPANDED if numbers.numel() <= most * count)
    overlap = can_overlap(x.device)
    experts_with_configs(
        x, gate_up, down, numbers, weights, out, configs, overlap=overlap, others=others, adapters=adapters
    )


@functools.cache
def scaled_configs(
    mixture: tuple[int, int, int, int], tokens: int, codes: torch.dtype, block: int | None, memory: int
) -> ExpertConfigs:
    """The configs for a mixture (experts, chosen, hidden, width) of 8-bit codes and this many tokens, as tuned_config
    has them. The steps of products are no longer than `block` columns that share a scale; None: all of a row do."""
    first, second = nearest_configs(SCALED, mixture, tokens, memory, item=1, in_tiles=codes == torch.int8)
    if block is None or isinstance(first, GemvConfig) or isinstance(second, GemvConfig):
        return first, second  # type: ignore[return-value]
    longer = max(1, first.block_k // block)
    rows = min(_LARGEST_BLOCKED, first.block_n)
    first = replace(first, block_n=rows, block_k=first.block_k // longer, stages=min(6, first.stages * longer))
    return first, replace(second, block_k=min(second.block_k, block))
