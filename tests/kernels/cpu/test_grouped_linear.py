"""Products of integers whose columns share scales: those of the dequantized weights, within fp32's rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.cpu import grouped_linear as kernels
from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.reference import linear as reference
from quire.compute.kernels.reference.gguf_blocks import BlockWeight
from quire.compute.kernels.reference.linear import GroupedWeight
from tests.kernels.cpu.test_blocks import assert_close, rows_of

ROUNDING = 5e-7


def made(
    rows: int, columns: int, bits: int, group: int, asymmetric: bool, order: Tensor | None = None
) -> tuple[Any, Tensor]:
    """A packed weight, and what it stands for: [rows, columns], as x has its columns."""
    draw = torch.Generator().manual_seed(rows + columns + bits)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=draw, dtype=torch.uint8)
    scales = torch.rand((rows, columns // group), generator=draw) * 1e-3 + 1e-7  # also what fp16 does not hold
    zeros = torch.randint(0, 1 << bits, scales.shape, generator=draw, dtype=torch.uint8) if asymmetric else None
    packed = kernels.pack_grouped(codes, scales, zeros, bits, group, order)
    dense = reference.pack_grouped(codes, scales, zeros, bits, group, order).dense()
    return packed, dense if order is None else dense[:, order.argsort()]


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("rows", "columns", "group"),
    [(40, 256, 32), (16, 320, 64), (33, 640, 128), (24, 1024, 512), (48, 416, 416), (16, 384, 96)],
)
def test_products_are_those_of_the_dequantized_weights(
    rows: int, columns: int, group: int, bits: int, asymmetric: bool, instructions: str
) -> None:
    packed, dense = made(rows, columns, bits, group, asymmetric)
    assert isinstance(packed, BlockWeight) == (instructions != "none")
    bias = torch.linspace(-0.01, 0.01, rows)
    for tokens in (1, 3, 8, 21):
        x = rows_of(tokens, columns)
        y = kernels.grouped_linear(x, packed, bias)
        assert_close(y, F.linear(x.double(), dense.double(), bias.double()), 2 * ROUNDING)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_same_bits_beside_any_others(bits: int, instructions: str) -> None:
    packed, dense = made(64, 640, bits, 128, True)
    x = rows_of(205, 640)
    y = kernels.grouped_linear(x, packed, None)
    assert_close(y, F.linear(x.double(), dense.double()), 2 * ROUNDING)
    if instructions != "none":
        for first, last in ((0, 1), (5, 7), (40, 48), (60, 69), (185, 200)):
            assert torch.equal(kernels.grouped_linear(x[first:last], packed, None), y[first:last])


@pytest.mark.parametrize("width", [16, 24])
def test_gated_products_with_columns_in_another_order(width: int, instructions: str) -> None:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3))
    packed, dense = made(2 * width, 256, 4, 64, True, order)
    x, bias = rows_of(5, 256), torch.linspace(-1, 1, 2 * width)
    out = torch.empty((5, width))
    kernels.grouped_linear_silu_and_mul(x, packed, bias, out)
    gate, up = F.linear(x.double(), dense.double(), bias.double()).chunk(2, 1)
    assert_close(out, F.silu(gate) * up, 4 * ROUNDING)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_rows_than_fp32(dtype: torch.dtype, instructions: str) -> None:
    packed, dense = made(96, 256, 4, 128, True)
    x, bias = (rows_of(9, 256) / 8).to(dtype), torch.linspace(-1, 1, 96).to(dtype)
    y = kernels.grouped_linear(x, packed, bias)
    assert y.dtype == dtype
    assert_close(y, F.linear(x.double(), dense.double(), bias.double()), 5e-3)


def test_groups_that_end_within_32_columns_are_computed_by_torch(instructions: str) -> None:
    packed, dense = made(16, 96, 8, 48, True)
    assert isinstance(packed, GroupedWeight)
    x = rows_of(2, 96)
    assert_close(kernels.grouped_linear(x, packed, None), F.linear(x.double(), dense.double()), ROUNDING)


def test_a_weight_takes_its_codes_and_5_bytes_for_each_group(instructions: str) -> None:
    if library() is None:
        pytest.skip("nothing is packed")
    for bits in (4, 8):
        packed, _ = made(64, 1024, bits, 128, True)
        assert packed.data.nbytes == 64 * (1024 * bits // 8 + 5 * 1024 // 128)
