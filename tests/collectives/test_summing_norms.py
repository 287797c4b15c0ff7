"""Norms that add up over ranks: by one kernel, or by a sum and then a norm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.compute.collectives import custom_all_reduce
from quire.compute.collectives.collectives import norms_of
from quire.compute.collectives.custom_all_reduce import NormWay, SummingNorms

EPS = 1e-5
X, WEIGHT, DELTA = torch.randn(3, 3, 8, generator=torch.Generator().manual_seed(0)).unbind()


class Memory:
    """A NormMemory of three ranks that have the same summand."""

    def __init__(self, way: NormWay) -> None:
        self._way = way
        self.asked: list[NormWay] = []

    def norm_way_of(self, x: Tensor, weight: Tensor) -> NormWay:
        return self._way

    def norm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None, delta: Tensor, way: NormWay
    ) -> None:
        self.asked.append(way)
        if scales is None:
            norms_of("cpu").rms_norm(x, weight, eps, out, delta * 3)
        else:
            made = norms_of("cpu").rms_norm_quantized(x, weight, eps, out.dtype, delta * 3)
            out.copy_(made.codes)
            scales.copy_(made.scales)


@pytest.mark.parametrize("way", ["push", "pull", "separate"])
def test_the_sum_is_added_and_normed_in_every_way(way: NormWay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_all_reduce, "norms_of", lambda device: norms_of("cpu"))
    memory, weight = Memory(way), WEIGHT[0].contiguous()
    norms = SummingNorms(memory, lambda x: x.mul_(3)).norms
    x, expected_x, out, expected = X.clone(), X.clone(), torch.empty_like(X), torch.empty_like(X)
    norms_of("cpu").rms_norm(expected_x, weight, EPS, expected, DELTA * 3)
    norms.rms_norm(x, weight, EPS, out, DELTA.clone())
    assert torch.equal(x, expected_x)
    assert torch.equal(out, expected)

    made = norms.rms_norm_quantized(x := X.clone(), weight, EPS, torch.int8, DELTA.clone())
    codes = norms_of("cpu").rms_norm_quantized(X.clone(), weight, EPS, torch.int8, DELTA * 3)
    assert torch.equal(x, expected_x)
    assert torch.equal(made.codes, codes.codes)
    assert torch.equal(made.scales, codes.scales)
    assert (made.scales.shape, made.dtype) == ((3, 1), X.dtype)
    assert memory.asked == ([] if way == "separate" else [way, way])
