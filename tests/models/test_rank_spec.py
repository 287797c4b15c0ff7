"""Over how many ranks a model can be divided, and how large a rank's share is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.compute.mesh import Mesh
from quire.errors import ConfigError
from quire.models.layers.factory import LayerFactory
from quire.models.model import build_model
from quire.models.rank_spec import check_tensor_parallel_size, rank_share
from quire.models.spec import read_spec
from quire.models.weights.safetensors import SafetensorsCheckpoint
from quire.models.weights.tensor_options import TensorOptions
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


def test_whole_experts_are_divided_by_their_number_alone(tmp_path: Path) -> None:
    odd = {"moe_intermediate_size": 25, "num_experts": 5, "mlp_only_layers": []}
    spec = read_spec(make_tiny(tmp_path, **DIVISIBLE["qwen3 moe"] | odd))
    for size in (1, 2, 4):
        check_tensor_parallel_size(spec, size, whole_experts=True)
    with pytest.raises(ConfigError, match=r"over 1, 2, 4 ranks.* at least"):
        check_tensor_parallel_size(spec, 8, whole_experts=True)
    with pytest.raises(ConfigError, match=r"over 1 ranks"):
        check_tensor_parallel_size(spec, 2)
    owned = [
        list(range(own.start, own.start + own.count)) for own in (Mesh(r, 4, 1, 4).own_experts(5) for r in range(4))
    ]
    assert owned == [[0, 1], [2], [3], [4]]
    assert [Mesh(rank, 2, 2, 2).own_experts(5).count for rank in range(4)] == [3, 2, 3, 2]
    of_engines = [Mesh(rank, tp=2, ep=4, engine=engine).own_experts(5) for engine in range(2) for rank in range(2)]
    assert [own.start for own in of_engines] == [0, 2, 3, 4]
    assert of_engines[0].count == 2


@pytest.mark.parametrize("case", ["mixtral", "qwen3 moe"])
def test_a_share_with_whole_experts_says_what_its_weights_take(case: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 1024}
    spec = read_spec(make_tiny(tmp_path, **DIVISIBLE[case] | wide | {"moe_intermediate_size": 1024}))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    of_engines = [Mesh(rank, tp=2, ep=4, engine=engine) for engine in range(2) for rank in range(2)]
    for mesh in (*(Mesh(rank, tp=4, ep=4) for rank in range(4)), *of_engines):
        factory = LayerFactory(TensorOptions(torch.device("cpu"), torch.float32), None, mesh)
        build_model(spec, factory)
        for layer in factory.layers:
            layer.load_weights(checkpoint)
        held = sum(held_bytes(value) for layer in factory.layers for value in vars(layer).values())
        assert rank_share(spec, mesh).weight_bytes("float32") == pytest.approx(held, rel=0.03), mesh


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
    assert rank_share(spec, Mesh(0, tp=tp)).weight_bytes("float32") == pytest.approx(held, rel=0.03)
    assert rank_share(spec, Mesh()) is spec


@pytest.mark.parametrize("case", ["llama, biases", "qwen2, tied", "qwen3 moe", "gemma3"])
def test_shares_of_stages_say_what_their_weights_take(case: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 1024}
    layers = {"num_hidden_layers": 5} if case != "qwen3 moe" and case != "gemma3" else {}
    spec = read_spec(make_tiny(tmp_path, **DIVISIBLE[case] | wide | layers | {"moe_intermediate_size": 256}))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    covered: list[int] = []
    for stage in range(3):
        mesh = Mesh(stage, pp=3)
        factory = LayerFactory(TensorOptions(torch.device("cpu"), torch.float32), None, mesh)
        build_model(spec, factory)
        for layer in factory.layers:
            layer.load_weights(checkpoint)
        held = sum(held_bytes(value) for layer in factory.layers for value in vars(layer).values())
        share = rank_share(spec, mesh)
        assert share.weight_bytes("float32") == pytest.approx(held, rel=0.03), stage
        assert [group.reach for group in share.kv_groups()] == [group.reach for group in spec.kv_groups()]
        assert sorted(n for group in share.kv_groups() for n in group.layers) == list(range(len(share.layers)))
        covered += mesh.own_layers(len(spec.layers))
    assert covered == list(range(len(spec.layers)))


def held_bytes(value: object) -> int:
    """Of the tensors that a layer keeps."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, (tuple, list)):
        return sum(map(held_bytes, value))
    is_weight = type(value).__module__.startswith("quire.models.quantization")
    return sum(map(held_bytes, vars(value).values())) if is_weight and hasattr(value, "__dict__") else 0
