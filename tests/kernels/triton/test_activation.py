"""Triton's activations against the reference, and its tanh against the exact one."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.reference import activation as reference
from quire.compute.kernels.triton import activation as ours

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where exponentials overflow as they may

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (3, 63), (17, 1024), (2, 2500), (129, 40)]
SPREAD = 4.0
"""Of the inputs: far enough that activations saturate."""


def assert_near(found: Tensor, expected: Tensor) -> None:
    """To a few units in the last place of fp32; where a bf16 result is rounded, it may be a neighbour in few places."""
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=3e-6, atol=1e-6)
        return
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=1e-6)
    assert (found != expected).sum() <= 1 + 0.02 * found.numel()


def exact(name: str, x: Tensor) -> Tensor:
    """In float64, rounded where the reference rounds. The reference's gelu itself is inexact far below 0."""
    gate, up = x.chunk(2, -1) if name.endswith("and_mul") else (x, None)
    wide = gate.double()
    slope = wide if name.startswith("silu") else 1.5957691216057308 * (wide + 0.044715 * wide**3)
    activated = (wide * slope.sigmoid()).to(x.dtype)
    return activated if up is None else activated * up


def check(name: str, shape: tuple[int, int], ways: int, dtype: torch.dtype, device: str) -> None:
    x = (SPREAD * torch.randn(shape[0], ways * shape[1], device=device)).to(dtype)
    before = x.clone()
    found, expected = (torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2))
    getattr(ours, name)(x, found)
    getattr(reference, name)(x, expected)
    assert torch.equal(x, before)
    assert_near(found, exact(name, x))
    torch.testing.assert_close(found, expected, rtol=3e-6 if dtype == torch.float32 else 2**-6, atol=2e-5)


@pytest.mark.parametrize(("dtype", "shape"), [*product(DTYPES, SHAPES), (torch.float16, (3, 63))])
@pytest.mark.parametrize(("name", "ways"), [("silu_and_mul", 2), ("gelu_and_mul", 2), ("gelu", 1)])
def test_activations(name: str, ways: int, shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    check(name, shape, ways, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 3, 40)])
def test_soft_cap(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x = (50 * torch.randn(shape, device=device)).to(dtype)
    found, expected = x.clone(), x.clone()
    ours.soft_cap(found, 30.0)
    reference.soft_cap(expected, 30.0)
    assert_near(found, expected)


def test_tanh_is_as_exact_near_0_as_elsewhere(device: str) -> None:
    powers = torch.logspace(-6, 2, 4001, device=device)
    x = torch.cat((powers, -powers, torch.zeros(1, device=device)))
    found = x.clone()
    ours.soft_cap(found, 1.0)
    torch.testing.assert_close(found.double(), x.double().tanh(), rtol=1e-6, atol=0)


def test_extremes_stay_what_they_are(device: str) -> None:
    """Infinities and NaN, which are told apart from numbers later."""
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), 3e38, -3e38], device=device)
    capped = values.clone()
    ours.soft_cap(capped, 2.0)
    torch.testing.assert_close(
        capped, torch.tensor([2.0, -2.0, float("nan"), 2.0, -2.0], device=device), equal_nan=True
    )
    gated = torch.cat((values, torch.ones_like(values))).unsqueeze(0)
    for name in ("silu_and_mul", "gelu_and_mul"):
        found, expected = torch.empty(1, 5, device=device), torch.empty(1, 5, device=device)
        getattr(ours, name)(gated, found)
        getattr(reference, name)(gated, expected)
        assert torch.equal(found.isfinite(), expected.isfinite())


def test_nothing_is_activated(device: str) -> None:
    empty = torch.empty(0, 16, device=device)
    ours.silu_and_mul(empty, torch.empty(0, 8, device=device))
    ours.gelu(empty, torch.empty_like(empty))
    ours.soft_cap(empty, 2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 14336), (8192, 14336), (300, 3072), (8192, 768), (64, 151936)])
def test_activations_of_real_sizes(shape: tuple[int, int]) -> None:
    for name, ways in (("silu_and_mul", 2), ("gelu_and_mul", 2), ("gelu", 1)):
        check(name, shape, ways, torch.bfloat16, "cuda")
