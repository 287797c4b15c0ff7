"""A product and A x in one launch: the product as if it were alone, and A x against plain torch."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.triton.launching.dependent_launch import can_overlap
from quire.compute.kernels.triton.linear.gemm import GemmConfig, gemm
from quire.compute.kernels.triton.linear.gemm import tiles_of as tiles_of_product
from quire.compute.kernels.triton.linear.linear import dense_configs
from quire.compute.kernels.triton.lora_linear import gemm_and_shrink, room_beside
from tests.kernels.triton.not_interpreted import printed_by
from tests.kernels.triton.test_lora import NEAR, random_weights, tiles_of

CONFIGS = (
    GemmConfig(16, 64, 128, 1, 4, 3, True),
    GemmConfig(32, 32, 64, 2, 4, 4, False),
    GemmConfig(64, 64, 64, 3, 4, 3, True),
)
ADAPTERS = 32
BATCHES = {
    "no adapter": [0, 0],
    "one row": [1],
    "one adapter": [1] * 32,
    "beside others": [0, 0, 3] * 6,
    "several": [number % 5 for number in range(17)],
    "all": [1 + number % ADAPTERS for number in range(32)],
    "most rows": [number % (ADAPTERS + 1) for number in range(64)],
}


SHAPES = [(16, 640, (80,), True), (16, 272, (32, 16, 16), False), (64, 384, (48, 32), True)]
CASES = [
    (batch, *shape)
    for shape in SHAPES
    for batch in BATCHES
    if torch.cuda.is_available() or shape is SHAPES[0] or batch in ("beside others", "several")
]
"""Interpreted, other shapes are tried with some batches only."""


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("batch", "rank", "columns", "rows", "biased"), CASES)
def test_a_product_and_a_x_in_one_launch(
    config: GemmConfig, batch: str, rank: int, columns: int, rows: tuple[int, ...], biased: bool, device: str
) -> None:
    """The product is what it is without adapters, to the bit; A x has all ranks that are in use. Whatever the number of
    programs, and again with the counters that the launch before has left."""
    slots, dtype = BATCHES[batch], torch.bfloat16
    weights, tiles = random_weights(ADAPTERS, rank, columns, rows, dtype, device), tiles_of(slots, device, 5)
    x = torch.randn(len(slots), columns, device=device).to(dtype)
    w = (torch.randn(sum(rows), columns, device=device) / 32).to(dtype)
    bias = torch.randn(sum(rows), device=device).to(dtype) if biased else None
    alone = torch.empty(len(slots), sum(rows), dtype=dtype, device=device)
    overlap = can_overlap(x.device)
    gemm(x, w, bias, alone, config, gate=False, overlap=overlap)
    exact = [x.double() @ weights.a[slot].double().T for slot in range(ADAPTERS)]
    in_use = torch.arange(rank, device=device)[None, :] < weights.ranks[:, None]
    for programs in (0, 1, 7, 100) if device == "cuda" else (0, 7):
        y, low = gemm_and_shrink(x, w, bias, weights, tiles, config, programs, overlap)
        assert torch.equal(y, alone)
        for row, slot in enumerate(slots):
            if slot:
                found = low[row].view(len(rows), rank)[:, in_use[slot - 1]].double()
                expected = exact[slot - 1][row].view(len(rows), rank)[:, in_use[slot - 1]]
                assert found.numel() == 0 or (found - expected).abs().max() <= NEAR[dtype] * expected.abs().max()


def test_a_x_takes_the_room_that_products_of_a_layer_leave() -> None:
    """On the 132 multiprocessors of an H100, for tuned products of up to 64 rows; a head has no adapters."""
    table = dense_configs()
    for (outputs, _), configs in table.plain.items():
        for config, rows in zip(configs, table.up_to, strict=True):
            if isinstance(config, GemmConfig) and rows <= 64 and outputs < 100_000:
                count = tiles_of_product(rows, outputs, config)
                programs = room_beside(config, 132, 227 * 1024, count, 2)
                assert programs == 132 or (count * config.splits + programs) % 132 == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="it replaces the driver")
def test_a_x_leaves_as_much_room_as_the_product_alone() -> None:
    assert len(printed_by("tests.kernels.triton.compile_lora_linear").splitlines()) == 4
