"""Dummy weights: uniform, never constant, repeatable, each tensor its own."""

from __future__ import annotations

import pytest
import torch

from quire.models.weights.checkpoint import WeightSpec
from quire.models.weights.dummy import SPREAD, DummyCheckpoint

SPECS = [WeightSpec("a", (200, 300)), WeightSpec("b", (200, 300)), WeightSpec("norm", (64,))]


def read(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    checkpoint = DummyCheckpoint(SPECS, seed)
    out = torch.full(checkpoint.contents()[name].shape, 7.0, dtype=dtype)
    checkpoint.read(name, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uniform_within_the_spread(dtype: torch.dtype) -> None:
    x = read("a", dtype=dtype).double()
    assert x.abs().max() <= SPREAD
    assert x.min() < -0.99 * SPREAD
    assert x.max() > 0.99 * SPREAD
    assert x.mean().abs() < 0.02 * SPREAD
    assert (x.std() - SPREAD / 3**0.5).abs() < 0.01 * SPREAD
    assert read("norm", dtype=dtype).unique().numel() > 50


def test_own_values_for_each_name_and_seed() -> None:
    assert torch.equal(read("a"), read("a"))
    assert not torch.equal(read("a"), read("b"))
    assert not torch.equal(read("a"), read("a", seed=1))


def test_a_window_shows_the_whole_tensors_values() -> None:
    out = torch.empty(50, 7)
    DummyCheckpoint(SPECS, 0).read("a", out, (100, 20))
    assert torch.equal(out, read("a")[100:150, 20:27])
