"""Experts that are stacked, as a GPU has them, are those that a processor has one by one."""

from __future__ import annotations

import pytest
import torch

from quire.errors import CheckpointError
from quire.models.quantization.coded_experts import CodedLinearWeight, ExpertLoop, MakeWeight, StackedExperts
from quire.models.quantization.formats import CodebookFormat, Format, Fp8Format, GroupFormat, Int8Format
from quire.models.quantization.registry import scheme_of
from quire.models.quantization.scheme import ExpertNames, ExpertsShape
from quire.models.weights.dummy import DummyCheckpoint
from quire.models.weights.tensor_options import TensorOptions

SHAPE = ExpertsShape("experts", ExpertNames(), count=3, hidden=128, width=256)
OPTIONS = TensorOptions(torch.device("cpu"), torch.float32)
EXACT: tuple[Format, ...] = (
    GroupFormat("gptq", 4, 64, symmetric=False),
    GroupFormat("awq", 4, 128, symmetric=False),
    GroupFormat("compressed-tensors", 8, None, symmetric=True),
    CodebookFormat("dense", "nf4", 64),
    CodebookFormat("bitsandbytes", "nf4", 64, nested=True),
    CodebookFormat("mxfp4", "e2m1", 32),
    CodebookFormat("modelopt", "e2m1", 16),
)
ROUNDED: tuple[Format, ...] = (Int8Format(), Fp8Format("block"), Fp8Format("tensor"), Fp8Format(at_load=True))
"""One by one, activations are rounded as well."""


def scheme(form: Format) -> MakeWeight[CodedLinearWeight]:
    return scheme_of(form).linear  # type: ignore[return-value]


@pytest.mark.parametrize("form", EXACT + ROUNDED, ids=str)
@torch.inference_mode()
def test_both_ways_agree(form: Format) -> None:
    stacked, loop = StackedExperts(scheme(form), SHAPE, OPTIONS), ExpertLoop(scheme(form), SHAPE, OPTIONS)
    assert list(stacked.weight_specs()) == list(loop.weight_specs())
    checkpoint = DummyCheckpoint(stacked.weight_specs(), 0)
    stacked.load(checkpoint)
    loop.load(checkpoint)
    x = torch.randn(9, SHAPE.hidden, generator=torch.Generator().manual_seed(0))
    numbers = torch.tensor([[0, 1], [2, 0], [1, 2]] * 3, dtype=torch.int32)
    weights = torch.rand(9, 2)
    found, expected = stacked.multiply(x, numbers, weights), loop.multiply(x, numbers, weights)
    assert torch.linalg.vector_norm(found - expected) < (1e-5 if form in EXACT else 0.05) * torch.linalg.vector_norm(
        expected
    )


def test_reordered_columns_are_refused_where_experts_are_stacked() -> None:
    form = GroupFormat("gptq", 4, 64, symmetric=False, reordered=True)
    stacked = StackedExperts(scheme(form), SHAPE, OPTIONS)
    with pytest.raises(CheckpointError, match="desc_act"):
        stacked.load(DummyCheckpoint(stacked.weight_specs(), 0))
