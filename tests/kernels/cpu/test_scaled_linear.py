"""Products with int8 and fp8 weights: those of the dense weights, within fp32's rounding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.cpu import scaled_linear as kernels
from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.reference.gguf_blocks import BlockWeight
from quire.compute.kernels.reference.linear import ScaledWeight
from quire.compute.kernels.reference.quantized_rows import QuantizedRows, quantize_rows
from tests.kernels.cpu.test_blocks import assert_close

ROUNDING = 5e-7
OF_TORCH = 6e-2
"""It rounds activations to fp8 as well."""


def made(rows: int, columns: int, block: tuple[int, int]) -> tuple[ScaledWeight, BlockWeight | ScaledWeight]:
    """Of all codes but NaN; in the reference's form and packed."""
    draw = torch.Generator().manual_seed(rows + columns)
    bits = torch.randint(0, 256, (rows, columns), generator=draw, dtype=torch.uint8)
    codes = bits.masked_fill(bits & 127 == 127, 0).view(torch.float8_e4m3fn)
    scales = torch.rand((-(-rows // block[0]), -(-columns // block[1])), generator=draw) * 1e-3 + 1e-6
    weight = ScaledWeight(codes, scales, block)
    return weight, kernels.pack_scaled(weight)


def rounds_to_bytes(packed: BlockWeight | ScaledWeight) -> bool:
    """Whether products with this int8 weight round rows to 8 bits, with a scale for each, and not to 16."""
    own = library()
    return own is None or own.multiplies_bytes or isinstance(packed, ScaledWeight)


def rows_of(tokens: int, columns: int) -> Tensor:
    return torch.randn((tokens, columns), generator=torch.Generator().manual_seed(tokens))


@pytest.mark.parametrize(
    ("rows", "columns", "block"),
    [(40, 48, (1, 48)), (64, 300, (1, 300)), (130, 320, (1, 128)), (200, 256, (128, 128)), (16, 7, (1, 7))],
)
def test_products_are_those_of_the_dense_weights(
    rows: int, columns: int, block: tuple[int, int], instructions: str
) -> None:
    weight, packed = made(rows, columns, block)
    assert isinstance(packed, BlockWeight) == (instructions != "none")
    bias, bound = torch.linspace(-1, 1, rows), ROUNDING if instructions != "none" else OF_TORCH
    for tokens in (1, 2, 5, 8, 13, 70):
        x = rows_of(tokens, columns)
        exact = F.linear(x.double(), weight.dense().double(), bias.double())
        assert_close(kernels.scaled_linear(x, packed, bias), exact, bound)
        assert_close(kernels.scaled_linear(x.bfloat16(), packed, bias.bfloat16()), exact, 8e-3 + bound)


@pytest.mark.parametrize(("rows", "columns"), [(64, 32), (64, 96), (48, 528), (40, 512), (256, 768)])
def test_int8_with_a_scale_for_each_output(rows: int, columns: int, instructions: str) -> None:
    draw = torch.Generator().manual_seed(columns)
    codes = torch.randint(-128, 128, (rows, columns), generator=draw, dtype=torch.int8)
    weight = ScaledWeight(codes, torch.rand((rows, 1), generator=draw) + 0.01, (1, columns))
    packed = kernels.pack_scaled(weight)
    if columns % 32 == 0:
        assert isinstance(packed, BlockWeight) == (instructions != "none")
    bias, half = torch.linspace(-1, 1, rows), rows // 2
    for tokens in (1, 2, 3, 8, 9, 12, 13, 25, 40, 75):
        x = torch.randn((tokens, columns), generator=draw)
        seen = x.double()
        if rounds_to_bytes(packed):
            bytes_of_x, scales = quantize_rows(x, torch.int8, columns)
            seen = bytes_of_x.double() * scales.double()
        exact = F.linear(seen, weight.dense().double(), bias.double())
        assert_close(kernels.scaled_linear(x, packed, bias), exact, 2 * ROUNDING)
        out = torch.empty((tokens, half))
        kernels.scaled_linear_silu_and_mul(x, packed, bias, out)
        assert_close(out, F.silu(exact[:, :half]) * exact[:, half:], 4 * ROUNDING)


@pytest.mark.parametrize("columns", [48, 528])
def test_int8_rows_of_bfloat16_are_rounded_as_the_reference_does(columns: int, instructions: str) -> None:
    """Quotients that lie between two codes as well: with a weight that is the identity, products are the codes."""
    identity = torch.eye(columns, dtype=torch.int8)
    packed = kernels.pack_scaled(ScaledWeight(identity, torch.ones((columns, 1)), (1, columns)))
    if not rounds_to_bytes(packed):
        pytest.skip("rows are rounded to 16 bits")
    x = torch.randn((70, columns), generator=torch.Generator().manual_seed(columns)).bfloat16()
    x[1::3] = (torch.arange(columns) % 255 - 127).bfloat16() / 2  # half of them ties
    x[2::3] *= 1e-12
    x[5] = 0
    codes, scales = quantize_rows(x, torch.int8, columns)
    assert torch.equal(kernels.scaled_linear(x, packed, None), (codes * scales).bfloat16())
    x[3, 17], x[4, columns - 1], x[6, 0] = torch.nan, torch.inf, -torch.inf
    odd = kernels.scaled_linear(x, packed, None).isnan().all(1)
    assert odd.nonzero().flatten().tolist() == [3, 4, 6]


def test_gated_int8_products_of_bfloat16(instructions: str) -> None:
    """Whose gate is no more precise than they are."""
    draw = torch.Generator().manual_seed(11)
    codes = torch.randint(-128, 128, (128, 64), generator=draw, dtype=torch.int8)
    weight = ScaledWeight(codes, torch.rand((128, 1), generator=draw) * 0.3, (1, 64))
    packed = kernels.pack_scaled(weight)
    if not isinstance(packed, BlockWeight) or not rounds_to_bytes(packed):
        pytest.skip("torch computes, or rows are rounded to 16 bits")
    for tokens in (1, 20):
        x = torch.randn((tokens, 64), generator=draw).bfloat16()
        bytes_of_x, scales = quantize_rows(x, torch.int8, 64)
        seen = bytes_of_x.double() * scales.double()
        gate, up = F.linear(seen, weight.dense().double()).chunk(2, 1)
        assert gate.abs().max() > 90
        out = torch.empty((tokens, 64), dtype=torch.bfloat16)
        kernels.scaled_linear_silu_and_mul(x, packed, None, out)
        torch.testing.assert_close(out.double(), F.silu(gate) * up, rtol=2**-8, atol=1e-6)


def test_int8_rows_do_not_depend_on_their_neighbours(instructions: str) -> None:
    draw = torch.Generator().manual_seed(3)
    codes = torch.randint(-128, 128, (96, 288), generator=draw, dtype=torch.int8)
    packed = kernels.pack_scaled(ScaledWeight(codes, torch.rand((96, 1), generator=draw), (1, 288)))
    if not isinstance(packed, BlockWeight):
        pytest.skip("torch computes")
    x = torch.randn((50, 288), generator=draw)
    together = kernels.scaled_linear(x, packed, None)
    for first, count in ((0, 1), (7, 2), (30, 13)):
        alone = kernels.scaled_linear(x[first : first + count], packed, None)
        assert torch.equal(alone, together[first : first + count])


@pytest.mark.parametrize("code", [-128, 127])
def test_int8_sums_of_the_largest_numbers_do_not_overflow(code: int, instructions: str) -> None:
    weight = ScaledWeight(torch.full((16, 768), code, dtype=torch.int8), torch.ones((16, 1)), (1, 768))
    for tokens in (1, 20):
        y = kernels.scaled_linear(torch.full((tokens, 768), -3.0), kernels.pack_scaled(weight), None)
        assert_close(y, torch.full((tokens, 16), -3.0 * code * 768).double(), 2 * ROUNDING)


def test_int8_beside_a_number_far_larger(instructions: str) -> None:
    """It takes its run's scale, but no more of the others than bf16's rounding would take of a result of its size."""
    draw = torch.Generator().manual_seed(7)
    codes = torch.randint(-128, 128, (32, 512), generator=draw, dtype=torch.int8)
    codes[:, 9] = 0  # so that the product is the others'
    weight = ScaledWeight(codes, torch.ones((32, 1)), (1, 512))
    packed = kernels.pack_scaled(weight)
    if rounds_to_bytes(packed):
        pytest.skip("rows are rounded to 8 bits, with a scale for all of a row")
    x = torch.randn((10, 512), generator=draw).bfloat16()
    x[:, 9] = 100
    y = kernels.scaled_linear(x, packed, None)
    assert_close(y, F.linear(x.double(), weight.dense().double()), 8e-3)


def test_rows_that_are_quantized_already(instructions: str) -> None:
    draw = torch.Generator().manual_seed(5)
    codes = torch.randint(-128, 128, (32, 64), generator=draw, dtype=torch.int8)
    weight = ScaledWeight(codes, torch.rand((32, 1), generator=draw), (1, 64))
    rows = QuantizedRows(*quantize_rows(torch.randn((3, 64), generator=draw), torch.int8, 64), torch.bfloat16)
    y = kernels.scaled_linear(rows, kernels.pack_scaled(weight), None)
    assert y.dtype == torch.bfloat16
    assert_close(y, (rows.codes * rows.scales).double() @ weight.dense().double().T, 5e-3)


@pytest.mark.parametrize("width", [64, 48])
def test_gated_products(width: int, instructions: str) -> None:
    weight, packed = made(2 * width, 96, (1, 96))
    for tokens in (1, 20):
        x, out = rows_of(tokens, 96), torch.full((tokens, width + 3), 7.0)
        kernels.scaled_linear_silu_and_mul(x, packed, None, out[:, :width])
        gate, up = F.linear(x.double(), weight.dense().double()).chunk(2, 1)
        assert_close(out[:, :width], F.silu(gate) * up, 2 * ROUNDING if instructions != "none" else 2 * OF_TORCH)
        assert (out[:, width:] == 7).all()


def test_a_large_product_is_shared_between_threads(instructions: str) -> None:
    if instructions == "none":
        pytest.skip("torch computes")
    weight, packed = made(1000, 1024, (128, 128))
    x = rows_of(9, 1024)
    assert_close(kernels.scaled_linear(x, packed, None), F.linear(x.double(), weight.dense().double()), ROUNDING)


def test_a_row_that_is_not_finite_harms_no_other(instructions: str) -> None:
    weight, packed = made(64, 96, (1, 96))
    x = rows_of(3, 96)
    x[1, 50] = float("inf")
    y = kernels.scaled_linear(x, packed, None)
    assert not y[1].isfinite().any()
    exact = F.linear(x[[0, 2]].double(), weight.dense().double())
    assert_close(y[[0, 2]], exact, ROUNDING if instructions != "none" else OF_TORCH)


def test_an_int8_row_that_is_not_finite_harms_no_other(instructions: str) -> None:
    draw = torch.Generator().manual_seed(5)
    codes = torch.randint(1, 128, (64, 96), generator=draw, dtype=torch.int8)
    weight = ScaledWeight(codes, torch.rand((64, 1), generator=draw), (1, 96))
    packed = kernels.pack_scaled(weight)
    for bad in (float("inf"), float("nan")):
        x = rows_of(3, 96)
        x[1, 50] = bad
        y = kernels.scaled_linear(x, packed, None)
        assert not y[1].isfinite().any()
        assert_close(y[[0, 2]], kernels.scaled_linear(x[[0, 2]], packed, None), ROUNDING)
