"""What the start says weights take is what they take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.compute.kernels.reference.gguf_blocks import BlockWeight
from quire.compute.kernels.reference.linear import CodebookWeight, GroupedWeight, ScaledWeight
from quire.models.layers.factory import LayerFactory
from quire.models.layers.layer import weight_specs_of
from quire.models.model import build_model
from quire.models.spec import read_spec
from quire.models.weights.dummy import DummyCheckpoint
from quire.models.weights.tensor_options import TensorOptions
from tests.checkpoints import make_llama, make_tiny
from tests.quantization import made
from tests.quantization.test_checkpoints import SHAPE, WEIGHT_ONLY, WITH_ACTIVATIONS
from tests.quantization.test_every_scheme import EXPERTS


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
    if isinstance(value, (ScaledWeight, GroupedWeight, CodebookWeight, BlockWeight)):
        return sum(each.nbytes for each in value if isinstance(each, torch.Tensor))
    if isinstance(value, (tuple, list)):
        return sum(map(_bytes, value))
    return (
        sum(map(_bytes, vars(value).values())) if type(value).__module__.startswith("quire.models.quantization") else 0
    )


@pytest.mark.parametrize(
    "case",
    [
        *("gptq", "gptq, zeros", "awq", "compressed, channels", "fp8, blocks", "fp8, channels", "bitsandbytes nf4"),
        *(
            "int8, channels",
            "bitsandbytes int8",
            "mxfp4, compressed",
            "mxfp4, quark",
            "nvfp4, compressed",
            "nvfp4, modelopt",
        ),
    ],
)
def test_quantized_files_say_what_their_weights_take(case: str, tmp_path: Path) -> None:
    config, make = (WEIGHT_ONLY | WITH_ACTIVATIONS)[case]
    directory = make_llama(tmp_path / "model", **SHAPE, dtype="bfloat16")
    made.quantize(directory, config, make)
    found = held(directory, None)
    assert read_spec(directory).weight_bytes("bfloat16") == pytest.approx(found, rel=0.03)
    (directory / "model.safetensors").unlink()
    assert read_spec(directory).weight_bytes("bfloat16") == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize(
    "case", ["gptq, zeros", "fp8, channels", "int8, channels", "mxfp4, compressed", "bitsandbytes nf4"]
)
def test_so_do_those_of_experts_and_tied_heads(case: str, tmp_path: Path) -> None:
    """So large that the router, which a processor's layout pads to 64 experts, is less than 2% of it."""
    config, quantize = (WEIGHT_ONLY | WITH_ACTIVATIONS)[case]
    if "ignore" in config:
        config = config | {"ignore": [*config["ignore"], "re:.*gate$"]}
    settings = EXPERTS | {"intermediate_size": 1024, "tie_word_embeddings": True, "dtype": "bfloat16"}
    directory = make_tiny(tmp_path / "model", **settings)
    made.quantize(directory, config, quantize)
    assert read_spec(directory).weight_bytes("bfloat16") == pytest.approx(held(directory, None), rel=0.03)


@pytest.mark.parametrize(("method", "most"), [("fp8", 0.65), ("bitsandbytes", 0.5)])
def test_weights_that_are_quantized_at_load_take_less(method: str, most: float, tmp_path: Path) -> None:
    directory = make_llama(tmp_path / "model", **SHAPE, dtype="bfloat16")
    found = held(directory, method)
    assert found < most * read_spec(directory).weight_bytes("bfloat16")
    assert read_spec(directory, method).weight_bytes("bfloat16") == pytest.approx(found, rel=0.03)
