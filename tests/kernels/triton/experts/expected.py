"""What experts of 8-bit codes make where activations are codes too, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.kernels.reference.experts import ExpertAdapters, StackedLowRank, one_of
from quire.compute.kernels.reference.linear import ScaledWeight
from quire.compute.kernels.reference.quantized_rows import quantize_rows
from quire.compute.kernels.triton.experts.expert_gemms import ExpertConfigs
from quire.compute.kernels.triton.linear.gemm import GemmConfig
from tests.kernels.triton.linear.coded_weights import gate_and_up


def quantized(
    x: Tensor,
    gate_up: ScaledWeight,
    down: ScaledWeight,
    numbers: Tensor,
    weights: Tensor,
    configs: ExpertConfigs,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """What the products of tiles make, expert by expert.

    Codes of tokens are as the reference has them. Those of the second product have a scale for each tile of the first
    one, or are quantized between the two. Adapters take dense activations.
    """
    first, second = configs
    assert isinstance(first, GemmConfig)
    dtype, of_tile = gate_up.codes.dtype, first.block_n // 2
    at_once = adapters is None and of_tile % second.block_k == 0
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    rows = as_codes(x, dtype, gate_up.block[1])
    for expert in range(len(down.codes)):
        token, choice = (numbers == expert).nonzero(as_tuple=True)
        one, two = (one_of(stack, expert).dense().double() for stack in (gate_up, down))
        sums = rows[token] @ one.T
        if adapters is not None:
            sums += added_to(x[token], adapters.gate_up, adapters.slots[token], expert)
        middle = gate_and_up(sums).to(torch.float32 if at_once else x.dtype)
        made = as_codes(middle, dtype, of_tile if at_once else down.block[1]) @ two.T
        if adapters is not None:
            made += added_to(middle, adapters.down, adapters.slots[token], expert)
        out.index_add_(0, token, weights[token, choice, None].double() * made)
    return out


def as_codes(values: Tensor, dtype: torch.dtype, group: int) -> Tensor:
    """What codes of the values stand for."""
    codes, scales = quantize_rows(values, dtype, group)
    return codes.double() * scales.double().repeat_interleave(group, 1)[:, : values.shape[1]]


def close_in_codes(found: Tensor, expected: Tensor) -> None:
    """By the norm of what they differ by: dense activations instead of codes would be off by 3e-2 and more.

    Single outputs may be off further. Tensor cores of sm_90 keep 13 bits of sums of fp8, and those may decide between
    neighbouring codes of a value between the products, or move the largest one, by which its row is scaled. Emulated
    with such sums, the products of 17 tokens in tests of coded experts are off by 1.89e-2 of the largest, as on a card.
    """
    off = found.double() - expected
    of_all, largest = off.norm() / expected.norm(), off.abs().max() / expected.abs().max()
    assert of_all < 2e-2, f"{of_all:.2e}"
    assert largest < 5e-2, f"{largest:.2e}"


def added_to(x: Tensor, weights: StackedLowRank, slots: Tensor, number: int) -> Tensor:
    """What adapters add to the product of rows of x by an expert."""
    out = x.new_zeros((len(x), weights.b.shape[2]), dtype=torch.float64)
    for slot in slots.unique().tolist():
        if slot:
            own = slots == slot
            out[own] = x[own].double() @ update(weights, slot, number).T
    return out


def update(weights: StackedLowRank, slot: int, number: int) -> Tensor:
    """B A, [outputs, columns], of an expert and an adapter."""
    modules, rank = weights.modules, weights.b.shape[3]
    a = weights.a[slot - 1, number].double().view(modules, rank, -1)
    b = weights.b[slot - 1, number].double().view(modules, -1, rank)
    return (b @ a).flatten(0, 1)
