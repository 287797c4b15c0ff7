"""Kernels with bound weights compute what the plain ones do, also from large pages; wrong rows are refused."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.cpu.bound import bound_linear, bound_rms_norm, bound_silu_and_mul
from quire.compute.kernels.cpu.large_pages import LargePages
from quire.compute.kernels.cpu.linear import PackedWeight, linear, linear_silu_and_mul, pack_linear
from quire.compute.kernels.reference import norm as reference

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("outputs", [256, 100])
def test_products(dtype: torch.dtype, rows: int, outputs: int) -> None:
    x, weight, bias = (
        torch.randn(rows, 96).to(dtype),
        torch.randn(outputs, 96).to(dtype),
        torch.randn(outputs).to(dtype),
    )
    packed = pack_linear(weight)
    pages = LargePages(weight.nbytes * 2)
    moved = pages.moved(packed)
    assert not isinstance(packed, PackedWeight) or moved.data.data_ptr() != packed.data.data_ptr()
    assert torch.equal(bound_linear(moved, bias)(x), linear(x, packed, bias))
    assert torch.equal(bound_linear(moved, None)(x.repeat(1, 2)[:, :96]), linear(x, packed, None))
    expected = x.new_empty((rows, outputs // 2))
    linear_silu_and_mul(x, packed, bias, expected)
    assert torch.equal(bound_silu_and_mul(moved, bias, outputs // 2)(x), expected)


def test_weights_that_do_not_fit_stay_where_they_are() -> None:
    packed = pack_linear(torch.randn(64, 64))
    if not isinstance(packed, PackedWeight):
        pytest.skip("there are no CPU kernels here")
    pages = LargePages(packed.data.nbytes)
    places = [pages.moved(packed).data for _ in range(300)]  # type: ignore[union-attr]
    assert all(torch.equal(place, packed.data) for place in places)
    assert places[0].data_ptr() % (1 << 21) == 0
    assert places[-1].data_ptr() == packed.data.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 3, 64).to(dtype), torch.randn(64)
    for each in (weight, weight.to(dtype)):
        expected = torch.empty_like(x)
        reference.rms_norm(x, each, 1e-6, expected)
        torch.testing.assert_close(bound_rms_norm(each, 1e-6, dtype)(x), expected)


def test_rows_of_another_width_or_dtype_are_refused() -> None:
    if not isinstance(packed := pack_linear(torch.randn(64, 32)), PackedWeight):
        pytest.skip("there are no CPU kernels here")
    for x in (torch.randn(2, 16), torch.randn(2, 32).bfloat16()):
        with pytest.raises(RuntimeError, match="a product of 32"):
            bound_linear(packed, None)(x)
        with pytest.raises(RuntimeError, match="a norm of 32"):
            bound_rms_norm(torch.ones(32), 1e-6, torch.float32)(x)
