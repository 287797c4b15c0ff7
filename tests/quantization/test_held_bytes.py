"""What the start says weights take is what they take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.kernels.reference.grouped_linear import GroupedWeight
from quire.kernels.reference.scaled_linear import ScaledWeight
from quire.layers.factory import LayerFactory
from quire.layers.layer import weight_specs_of
from quire.models.model import build_model
from quire.models.spec import read_spec
from quire.weights.dummy import DummyCheckpoint
from quire.weights.tensor_options import TensorOptions
from tests.checkpoints import make_llama
from tests.quantization import made
from tests.quantization.test_checkpoints import SHAPE, WEIGHT_ONLY, WITH_ACTIVATIONS


def held(directory: Path, quantization: str | None) -> int:
    """Bytes of all tensors that the layers of this model keep, in bf16."""
    spec = read_spec(directory, quantization)
    factory = LayerFactory(TensorOptions(torch.device("cpu"), torch.bfloat16), spec.quantization)
    build_model(spec, factory)
    checkpoint = DummyCheckpoint(weight_specs_of(factory.layers), 0)
    for layer in factory.layers:
        layer.load_weights(checkpoint)
    return sum(_bytes(value) for layer in factory.layers for value in vars(layer).values())


def _bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, (ScaledWeight, GroupedWeight)):
        return sum(each.nbytes for each in value if isinstance(each, torch.Tensor))
    if isinstance(value, tuple):
        return sum(map(_bytes, value))
    return sum(map(_bytes, vars(value).values())) if type(value).__module__.startswith("quire.quantization") else 0


@pytest.mark.parametrize("case", ["gptq", "gptq, zeros", "awq", "compressed, channels", "fp8, blocks", "fp8, channels"])
def test_quantized_files_say_what_their_weights_take(case: str, tmp_path: Path) -> None:
    config, make = (WEIGHT_ONLY | WITH_ACTIVATIONS)[case]
    directory = make_llama(tmp_path / "model", **SHAPE, dtype="bfloat16")
    made.quantize(directory, config, make)
    found = held(directory, None)
    assert read_spec(directory).weight_bytes("bfloat16") == pytest.approx(found, rel=0.03)
    (directory / "model.safetensors").unlink()
    assert read_spec(directory).weight_bytes("bfloat16") == pytest.approx(found, rel=0.03)


def test_weights_that_are_quantized_at_load_take_half(tmp_path: Path) -> None:
    directory = make_llama(tmp_path / "model", **SHAPE, dtype="bfloat16")
    found = held(directory, "fp8")
    assert found < 0.65 * read_spec(directory).weight_bytes("bfloat16")
    assert read_spec(directory, "fp8").weight_bytes("bfloat16") == pytest.approx(found, rel=0.03)
