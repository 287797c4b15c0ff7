"""Gates and ups with the updates of their rows in one launch, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.reference import lora as reference
from quire.kernels.reference.linear import linear
from quire.kernels.reference.lora import LowRankWeights, Scaling, Tiles
from quire.kernels.triton.launching.dependent_launch import can_overlap
from quire.kernels.triton.linear.gemm import GemmConfig, gemm
from quire.kernels.triton.lora_gated import gated_gemm_and_update
from tests.kernels.triton.test_lora import NEAR, random_weights, tiles_of
from tests.kernels.triton.test_lora_linear import ADAPTERS, BATCHES, CONFIGS


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("rank", "columns", "width", "biased"), [(16, 272, 72, False), (64, 384, 48, True)])
def test_gates_and_ups_with_their_updates(
    config: GemmConfig, batch: str, rank: int, columns: int, width: int, biased: bool, device: str
) -> None:
    """Rows that no adapter changes are as they are without, to the bit. Whatever the number of programs, and again with
    what the launch before has left."""
    slots, dtype = BATCHES[batch], torch.bfloat16
    weights, tiles = random_weights(ADAPTERS, rank, columns, (width, width), dtype, device), tiles_of(slots, device, 5)
    x = torch.randn(len(slots), columns, device=device).to(dtype)
    w = (torch.randn(2 * width, columns, device=device) / 32).to(dtype)
    bias = torch.randn(2 * width, device=device).to(dtype) if biased else None
    alone = torch.empty(len(slots), width, dtype=dtype, device=device)
    overlap = can_overlap(x.device)
    gemm(x, w, bias, alone, config, gate=True, overlap=overlap)
    expected = updated(x, w, bias, weights, tiles)
    unchanged = [number for number, slot in enumerate(slots) if slot == 0 or not weights.ranks[slot - 1]]
    for programs in (2, 7, 100):
        y = torch.empty_like(alone)
        gated_gemm_and_update(x, w, bias, weights, tiles, y, config, programs, overlap)
        assert torch.equal(y[unchanged], alone[unchanged])
        assert (y.double() - expected).abs().max() <= NEAR[dtype] * expected.abs().max()


def updated(x: Tensor, w: Tensor, bias: Tensor | None, weights: LowRankWeights, tiles: Tiles) -> Tensor:
    """In 64 bits, by the reference."""
    assert weights.scaling is not None
    factors, summands, used = weights.scaling
    scaling = Scaling(factors.double(), summands.double(), used)
    exact = weights._replace(a=weights.a.double(), b=weights.b.double(), scaling=scaling)
    y = linear(x.double(), w.double(), None if bias is None else bias.double())
    out = y.new_empty((len(x), len(w) // 2))
    reference.lora_expand_silu_and_mul(reference.lora_shrink(x.double(), exact, tiles), exact, tiles, y, out)
    return out
