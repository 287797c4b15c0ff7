"""Over how many ranks a model can be divided, and how large a rank's share is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.errors import ConfigError
from quire.layers.factory import LayerFactory
from quire.mesh import Mesh
from quire.models.model import build_model
from quire.models.rank_share import check_tensor_parallel_size, rank_share
from quire.models.spec import read_spec
from quire.weights.safetensors import SafetensorsCheckpoint
from quire.weights.tensor_options import TensorOptions
from tests.checkpoints import make_llama, make_tiny
from tests.models.divisible import DIVISIBLE


@pytest.mark.parametrize(
    ("shape", "served"),
    [
        ({"heads": 8, "kv_heads": 2, "intermediate": 96}, "1, 2, 4, 8"),
        ({"heads": 6, "kv_heads": 3, "hidden": 96, "intermediate": 96}, "1, 3, 6"),
        ({"heads": 6, "kv_heads": 2, "hidden": 96, "intermediate": 96}, "1, 2, 6"),
        ({"heads": 8, "kv_heads": 8, "intermediate": 100}, "1, 2, 4"),
    ],
)
def test_a_size_that_does_not_divide_is_refused_with_those_that_do(
    shape: dict[str, int], served: str, tmp_path: Path
) -> None:
    spec = read_spec(make_llama(tmp_path, tokenizer=False, layers=1, **shape))
    sizes = {int(size) for size in served.split(", ")}
    for size in range(-1, 14):
        if size in sizes:
            check_tensor_parallel_size(spec, size)
        else:
            with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size}: .* over {served} ranks"):
                check_tensor_parallel_size(spec, size)


def test_the_width_of_experts_counts_and_that_of_mlps_only_where_there_are_any(tmp_path: Path) -> None:
    spec = read_spec(make_tiny(tmp_path / "a", **DIVISIBLE["mixtral"] | {"intermediate_size": 98}))
    with pytest.raises(ConfigError, match="over 1, 2 ranks"):
        check_tensor_parallel_size(spec, 4)
    moe = DIVISIBLE["qwen3 moe"] | {"intermediate_size": 97, "mlp_only_layers": []}
    check_tensor_parallel_size(read_spec(make_tiny(tmp_path / "b", **moe)), 4)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("case", ["llama, biases", "qwen2, tied", "qwen3 moe", "gpt2"])
def test_a_share_says_what_its_weights_take(case: str, tp: int, tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 1024, "n_inner": 1024, "head_dim": 64, "vocab_size": 1024}
    spec = read_spec(make_tiny(tmp_path, **DIVISIBLE[case] | wide | {"moe_intermediate_size": 256}))
    factory = LayerFactory(TensorOptions(torch.device("cpu"), torch.float32), None, Mesh(0, tp=tp))
    build_model(spec, factory)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for layer in factory.layers:
        layer.load_weights(checkpoint)
    held = sum(held_bytes(value) for layer in factory.layers for value in vars(layer).values())
    assert rank_share(spec, tp).weight_bytes("float32") == pytest.approx(held, rel=0.03)
    assert rank_share(spec, 1) is spec


def held_bytes(value: object) -> int:
    """Of the tensors that a layer keeps."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, (tuple, list)):
        return sum(map(held_bytes, value))
    is_weight = type(value).__module__.startswith("quire.quantization")
    return sum(map(held_bytes, vars(value).values())) if is_weight and hasattr(value, "__dict__") else 0
