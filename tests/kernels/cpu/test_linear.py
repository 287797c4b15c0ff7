"""Matrix products on packed weights equal the plain one."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.cpu import linear as packed
from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.reference import linear as plain

TOLERANCE = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (2e-2, 2e-2), torch.float16: (2e-2, 2e-2)}
SHAPES = [(50, 36), (64, 64), (1, 1), (65, 33), (200, 301), (300, 1030)]
ROWS = [0, 1, 2, 3, 5, 6, 7, 13, 16, 31, 70, 97, 230]

pytestmark = pytest.mark.usefixtures("instructions")


def normal(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
@torch.inference_mode()
def test_packed_equals_plain(dtype: torch.dtype, outputs: int, columns: int) -> None:
    """With a bias and without, for any number of rows; rows of x may lie apart."""
    weight = normal(outputs, columns, dtype=dtype, seed=0)
    own, bias = packed.pack_linear(weight.clone()), normal(outputs, dtype=dtype, seed=1)
    rtol, atol = TOLERANCE[dtype]
    for rows in ROWS:
        x = normal(rows, columns + 3, dtype=dtype, seed=2)[:, :columns]
        for b in (None, bias):
            expected = plain.linear(x.float(), weight.float(), None if b is None else b.float())
            found = packed.linear(x, own, b)
            assert found.dtype == dtype
            torch.testing.assert_close(found.float(), expected, rtol=rtol, atol=atol * columns**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "columns"), [(256, 100), (128, 64), (100, 64), (640, 33)])
@torch.inference_mode()
def test_gate_of_the_product(dtype: torch.dtype, outputs: int, columns: int) -> None:
    weight, bias = normal(outputs, columns, dtype=dtype, seed=0), normal(outputs, dtype=dtype, seed=1)
    own = packed.pack_linear(weight.clone())
    rtol, atol = TOLERANCE[dtype]
    for rows in ROWS:
        x = normal(rows, columns, dtype=dtype, seed=2)
        out, expected = (torch.empty(rows, outputs // 2, dtype=t) for t in (dtype, torch.float32))
        packed.linear_silu_and_mul(x, own, bias, out)
        plain.linear_silu_and_mul(x.float(), weight.float(), bias.float(), expected)
        torch.testing.assert_close(out.float(), expected, rtol=rtol, atol=atol * columns)


def test_nothing_of_the_padding_reaches_a_product(instructions: str) -> None:
    """What lies behind the outputs is not written, and a NaN beside a row of x stays there."""
    if instructions == "none":
        pytest.skip("torch's own products are not padded")
    x = torch.full((7, 40), float("nan"), dtype=torch.bfloat16)
    x[:, :33] = 1
    weight = packed.pack_linear(torch.ones(70, 33, dtype=torch.bfloat16))
    assert isinstance(weight, packed.PackedWeight)
    y = torch.full((7, 80), -1.0, dtype=torch.bfloat16)
    packed._multiply("linear", x[:, :33], weight, None, y[:, :70])
    assert (y[:, :70] == 33).all()
    assert (y[:, 70:] == -1).all()
    assert library() is weight.library


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "columns"), [*SHAPES, (64, 256), (70, 257), (384, 1536)])
@torch.inference_mode()
def test_rounded_is_as_near_as_packed(dtype: torch.dtype, outputs: int, columns: int) -> None:
    """Also where a row has a few large values, in one stretch of columns."""
    weight, bias = normal(outputs, columns, dtype=dtype, seed=0), normal(outputs, dtype=dtype, seed=1)
    own, other = packed.pack_rounded(weight.clone()), packed.pack_linear(weight.clone())
    for rows in ROWS[1:]:
        x = normal(rows, columns + 3, dtype=torch.float32, seed=2)
        x[:, 0] *= 30
        x = x.to(dtype)[:, :columns]
        for b in (None, bias):
            expected = plain.linear(x.double(), weight.double(), None if b is None else b.double())
            found, near = (packed.linear(x, each, b).double() - expected for each in (own, other))
            assert found.norm() <= 1.5 * near.norm() + 1e-3 * expected.norm()
            assert found.abs().max() <= 1e-2 * expected.abs().max()


@torch.inference_mode()
def test_no_sum_of_rounded_products_overflows() -> None:
    """All products of a row are as large as they may be, and of one sign, with one large weight or none."""
    weight = torch.ones(70, 600, dtype=torch.bfloat16)
    weight[3:6, 7], weight[6:9] = 200, -1
    x = torch.ones(9, 600, dtype=torch.bfloat16)
    x[1::2] = -8
    found = packed.linear(x, packed.pack_rounded(weight.clone()), None).double()
    torch.testing.assert_close(found, x.double() @ weight.double().T, rtol=1e-2, atol=0)


@torch.inference_mode()
def test_what_is_not_finite_stays_in_its_row() -> None:
    weight = normal(64, 300, dtype=torch.bfloat16, seed=0)
    x = normal(7, 300, dtype=torch.bfloat16, seed=1)
    x[2, 280], x[4, 3] = float("nan"), float("inf")
    found = packed.linear(x, packed.pack_rounded(weight), None)
    assert found.isfinite().all(1).tolist() == [True, True, False, True, False, True, True]


@pytest.mark.parametrize("outputs", [256, 128, 100])
@torch.inference_mode()
def test_gate_of_the_rounded_product(outputs: int) -> None:
    weight, bias = normal(outputs, 300, dtype=torch.bfloat16, seed=0), normal(outputs, dtype=torch.bfloat16, seed=1)
    own, x = packed.pack_rounded(weight.clone()), normal(13, 300, dtype=torch.bfloat16, seed=2)
    out, expected = (torch.empty(13, outputs // 2, dtype=t) for t in (torch.bfloat16, torch.float32))
    packed.linear_silu_and_mul(x, own, bias, out)
    plain.linear_silu_and_mul(x.float(), weight.float(), bias.float(), expected)
    assert (out - expected).norm() <= 1e-2 * expected.norm()
