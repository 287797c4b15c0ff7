"""Norm and gate equal their references."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.cpu.activation import gelu, gelu_and_mul, silu_and_mul, soft_cap
from quire.compute.kernels.cpu.norm import layer_norm, rms_norm
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference import activation, norm

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

pytestmark = pytest.mark.usefixtures("instructions")


def normal(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (3, 50), (40, 1030), (7, 3, 33), (0, 16)])
def test_rms_norm(dtype: torch.dtype, wide: bool, shape: tuple[int, ...]) -> None:
    """The sum with `delta` is stored exactly as the reference stores it."""
    weight = normal(*shape[1:], seed=1, dtype=torch.float32 if wide else dtype)
    for delta in (None, normal(*shape, seed=2, dtype=dtype)):
        x = normal(*shape, seed=0, dtype=dtype)
        other = x.clone()
        found, expected = torch.empty_like(x), torch.empty_like(x)
        rms_norm(x, weight, 1e-5, found, delta)
        norm.rms_norm(other, weight, 1e-5, expected, delta)
        assert torch.equal(x, other)
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(1, 64), (3, 50), (40, 1030), (0, 16)])
def test_layer_norm(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Of values far from 0, whose variance must not be a difference of large numbers."""
    weight, bias = normal(shape[1], seed=1, dtype=dtype), normal(shape[1], seed=2, dtype=dtype)
    for delta in (None, normal(*shape, seed=3, dtype=dtype)):
        x = (normal(*shape, seed=0, dtype=torch.float32) + 100).to(dtype)
        other = x.clone()
        found, expected = torch.empty_like(x), torch.empty_like(x)
        layer_norm(x, weight, bias, 1e-5, found, delta)
        norm.layer_norm(other, weight, bias, 1e-5, expected, delta)
        assert torch.equal(x, other)
        torch.testing.assert_close(found, expected, rtol=10 * TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(1, 64), (3, 50), (40, 1031)])
@pytest.mark.parametrize("op", ["gelu_exact", "gelu_exact_and_mul", "quick_gelu", "relu", "relu_squared"])
def test_other_activations(op: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    ways = 2 if op.endswith("_and_mul") else 1
    x = 8 * normal(shape[0], ways * shape[1], seed=0, dtype=dtype)
    found, expected = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=torch.float32)
    kernel(op, "cpu")(x, found)
    getattr(activation, op)(x.float(), expected)
    torch.testing.assert_close(found.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(1, 64), (3, 50), (40, 1031)])
def test_gelu_and_bound(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """With a gate and without."""
    x = 8 * normal(shape[0], 2 * shape[1], seed=0, dtype=dtype)
    rtol, atol = TOLERANCE[dtype], TOLERANCE[dtype]
    found, expected = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=torch.float32)
    gelu_and_mul(x, found)
    activation.gelu_and_mul(x.float(), expected)
    torch.testing.assert_close(found.float(), expected, rtol=rtol, atol=atol)
    whole, wide = torch.empty_like(x), x.float()
    gelu(x, whole)
    activation.gelu(x.float(), wide)
    torch.testing.assert_close(whole.float(), wide, rtol=rtol, atol=atol)
    bounded, wide = x.clone(), x.float()
    soft_cap(bounded, 5.0)
    activation.soft_cap(wide, 5.0)
    torch.testing.assert_close(bounded.float(), wide, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(1, 64), (3, 50), (40, 1031)])
def test_silu_and_mul(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = 20 * normal(shape[0], 2 * shape[1], seed=0, dtype=dtype)
    found, expected = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=torch.float32)
    silu_and_mul(x, found)
    activation.silu_and_mul(x.float(), expected)
    torch.testing.assert_close(found.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_silu_of_what_is_not_usual(dtype: torch.dtype) -> None:
    """NaN stays, and what is far below 0 becomes 0."""
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([[nan, inf, -inf, -3e38, -1e36, -100.0, -88.5, -0.0, 0.0, 88.5, 3e38] * 3], dtype=dtype)
    x = torch.cat([gate, torch.ones_like(gate)], 1)
    found, expected = torch.empty_like(gate), torch.empty_like(gate)
    silu_and_mul(x, found)
    activation.silu_and_mul(x, expected)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=1e-30, equal_nan=True)
