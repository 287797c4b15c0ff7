"""Dummy weights of every format are random, never constant, and about ±1e-3 once they are dequantized."""

from __future__ import annotations

import pytest
import torch

from quire.models.layers.factory import LayerFactory
from quire.models.layers.layer import weight_specs_of
from quire.models.quantization.formats import (
    CodebookFormat,
    Format,
    Fp8Format,
    GroupFormat,
    Int8Format,
    Quantization,
    Rule,
)
from quire.models.weights.checkpoint import check_weights
from quire.models.weights.dummy import SPREAD, DummyCheckpoint
from quire.models.weights.tensor_options import TensorOptions

FORMATS: tuple[Format, ...] = (
    Fp8Format(at_load=True),
    Fp8Format("tensor"),
    Fp8Format("channel"),
    Fp8Format("block", scale_name="weight_scale_inv"),
    Int8Format(),
    GroupFormat("gptq", 4, 64, symmetric=False, reordered=True),
    GroupFormat("gptq_v2", 8, None, symmetric=False),
    GroupFormat("awq", 4, 128, symmetric=False),
    GroupFormat("compressed-tensors", 4, 32, symmetric=True),
    GroupFormat("compressed-tensors", 8, 128, symmetric=False, reordered=True),
    GroupFormat("bitsandbytes", 8, None, symmetric=True),
    CodebookFormat("dense", "nf4", 64),
    CodebookFormat("bitsandbytes", "nf4", 64),
    CodebookFormat("bitsandbytes", "fp4", 64, nested=True),
    CodebookFormat("mxfp4", "e2m1", 32),
    CodebookFormat("quark", "e2m1", 32),
    CodebookFormat("compressed-tensors", "e2m1", 16),
    CodebookFormat("modelopt", "e2m1", 16),
)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@torch.inference_mode()
def test_every_format_has_dummy_weights(form: Format) -> None:
    options = TensorOptions(torch.device("cpu"), torch.float32)
    factory = LayerFactory(options, Quantization("test", (Rule(("Linear",), form),)))
    layer = factory.column_parallel(("a", "b"), (160, 40), 256, bias=False)
    specs = weight_specs_of(factory.layers)
    checkpoint = DummyCheckpoint(specs, 0)
    check_weights(checkpoint, specs, "Test")
    layer.load_weights(checkpoint)
    weight = layer(torch.eye(256)).T
    assert weight.isfinite().all()
    assert weight.abs().max() < 2.1 * SPREAD
    assert 0.2 * SPREAD < weight.std() < SPREAD
    assert weight.mean().abs() < 0.2 * SPREAD
    assert len(weight.unique(dim=0)) == 200, "no two outputs are alike"
    assert len(weight.unique(dim=1).T) == 256, "nor two columns"
