"""Embeddings and angles in Triton against the reference and the exact values."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.reference import embedding as reference
from quire.compute.kernels.triton.step_inputs import angles, embed

DTYPES = [torch.float32, torch.bfloat16]


def poisoned(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("dtype", "scale"), [*product(DTYPES, (None, 45.25)), pytest.param(torch.float16, 45.25, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 63), (17, 1024), (129, 40), (2, 2500)])
def test_embed(tokens: int, width: int, scale: float | None, dtype: torch.dtype, device: str) -> None:
    weight = torch.randn(50, width, device=device).to(dtype)
    ids = torch.randint(0, 50, (tokens,), device=device)
    found, expected = (poisoned(device, dtype, tokens, width) for _ in range(2))
    embed(ids, weight, scale, found)
    reference.embed(ids, weight, scale, expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1.25])
@pytest.mark.parametrize(("tokens", "half"), [(1, 1), (3, 24), (17, 64), (129, 6)])
def test_angles(tokens: int, half: int, scale: float, each: bool, dtype: torch.dtype, device: str) -> None:
    positions = torch.randint(0, 200_000, (tokens,), device=device)
    frequencies = torch.rand((tokens, half) if each else (half,), device=device)
    frequencies[..., 0] = 1.0
    cos, sin, expected_cos, expected_sin = (poisoned(device, dtype, tokens, half) for _ in range(4))
    angles(positions, frequencies, scale, cos, sin)
    reference.angles(positions, frequencies, scale, expected_cos, expected_sin)
    exact = (positions.unsqueeze(1) * frequencies).double()  # the product is fp32
    tolerance = 3e-7 if dtype == torch.float32 else 2**-8
    for found, expected, true in ((cos, expected_cos, exact.cos()), (sin, expected_sin, exact.sin())):
        torch.testing.assert_close(found.double(), true * scale, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(found, expected, rtol=2 * tolerance, atol=tolerance)


def test_nothing_is_looked_up(device: str) -> None:
    none = torch.empty(0, dtype=torch.int64, device=device)
    embed(none, torch.ones(3, 8, device=device), None, torch.empty(0, 8, device=device))
    angles(none, torch.ones(4, device=device), 1.0, *(torch.empty(0, 4, device=device) for _ in range(2)))


@pytest.mark.gpu
def test_angles_of_every_position() -> None:
    """Of each position up to 131,072 at the frequencies of Llama 3."""
    positions = torch.arange(131_073, device="cuda")
    frequencies = 1 / 5e5 ** (torch.arange(0, 128, 2, device="cuda") / 128)
    cos, sin = (poisoned("cuda", torch.float32, len(positions), 64) for _ in range(2))
    angles(positions, frequencies, 1.0, cos, sin)
    exact = (positions.unsqueeze(1) * frequencies).double()
    assert (cos - exact.cos()).abs().max() < 3e-7
    assert (sin - exact.sin()).abs().max() < 3e-7


@pytest.mark.gpu
def test_embed_beyond_2_31_elements() -> None:
    weight = torch.zeros(600_000, 4_096, dtype=torch.bfloat16, device="cuda")
    weight[599_999] = 3
    embed(torch.tensor([599_999, 0], device="cuda"), weight, None, out := poisoned("cuda", torch.bfloat16, 2, 4_096))
    assert (out[0] == 3).all()
    assert (out[1] == 0).all()
