"""Mixtures of experts: which layers have one, what config.json may say of routers, and what is left out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.compute.mesh import Mesh
from quire.errors import CheckpointError
from quire.foundation.config import Config
from quire.models.layer_spec import MixtureSpec
from quire.models.layers.layer import weight_specs_of
from quire.models.rank_spec import rank_share
from quire.models.spec import read_spec
from quire.models.weights.tensor_options import TensorOptions
from quire.planning.costmodel.step_work import UsedWeights
from quire.runtime.worker.weight_loading import open_checkpoint, undivided_layers
from tests.checkpoints import TINY, edit_config, make_tiny
from tests.models.forward import logits_of
from tests.models_sweep.rows import ROWS, SHAPE

EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
MIXTURES = [name for name, row in ROWS.items() if row.keys() & EXPERTS and "like" not in row]
TOKENS = torch.arange(3, 40)
GLM: dict[str, Any] = TINY | {
    "architectures": ["Glm4MoeForCausalLM"],
    "num_hidden_layers": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
}


def spec_of(directory: Path, **changed: Any) -> Any:
    (directory / "config.json").write_text(json.dumps(GLM | changed))
    return read_spec(directory)


def with_experts(spec: Any) -> list[int]:
    return [number for number, layer in enumerate(spec.layers) if isinstance(layer.mlp, MixtureSpec)]


@pytest.mark.parametrize(
    ("changed", "numbers"),
    [
        ({}, [1, 2, 3]),
        ({"first_k_dense_replace": 0}, [0, 1, 2, 3]),
        ({"first_k_dense_replace": 3}, [3]),
        ({"mlp_layer_types": ["sparse", "dense", "dense", "sparse"]}, [0, 3]),
        ({"first_k_dense_replace": 0, "mlp_only_layers": [2]}, [0, 1, 3]),
        ({"moe_layer_end_index": 2}, [1, 2]),
        ({"first_k_dense_replace": 0, "decoder_sparse_step": 2}, [1, 3]),
    ],
)
def test_layers_with_experts(changed: dict[str, Any], numbers: list[int], tmp_path: Path) -> None:
    assert with_experts(spec_of(tmp_path, **changed)) == numbers


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_group": 3}, "'n_group' is 3, it must divide num_experts"),
        ({"topk_group": 5}, "'topk_group'.*at most n_group"),
        ({"num_experts_per_tok": 5}, "'num_experts_per_tok'.*8, of which 4 are in the best groups"),
        ({"mlp_layer_types": ["dense"]}, "'mlp_layer_types'.*4 entries"),
        ({"num_experts_per_tok": [3, 3, 2, 3]}, "must be the same for all layers"),
        ({"n_shared_experts": -1}, "'n_shared_experts'.*at least 0"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "experts have silu"),
        ({"scoring_func": "softmax"}, "'scoring_func'"),
    ],
)
def test_what_routers_do_not_serve_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_of(tmp_path, **changed)


def test_numbers_that_are_one_for_each_layer_may_be_a_list(tmp_path: Path) -> None:
    assert spec_of(tmp_path, num_experts_per_tok=[3] * 4).mixture == spec_of(tmp_path).mixture


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_uses_its_own_experts(tp: int, tmp_path: Path) -> None:
    """Together, ranks of one engine multiply a token with what one rank alone does, and each reads at most its own."""
    spec = spec_of(tmp_path, topk_group=4)
    whole, of_experts = UsedWeights(spec), spec.mixture.expert_weights * spec.layers_with_experts
    assert whole.experts_per_token == 3 * of_experts
    shares = [rank_share(spec, Mesh(rank % tp, tp, 1, 4, rank // tp)) for rank in range(4)]
    used = [UsedWeights(share) for share in shares]
    engines = 4 // tp
    assert sum(each.experts_per_token for each in used) == pytest.approx(engines * whole.experts_per_token)
    for each, share in zip(used, shares, strict=True):
        assert each.read(10**6) == pytest.approx(share.num_parameters - each.head)
        assert each.read(1) < each.read(3) < each.read(10**6)


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_with_whole_experts_share_the_one_of_all_tokens(tp: int, tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    share = rank_share(spec, Mesh(0, tp, ep=tp))
    assert share.mixture.width == spec.mixture.width
    assert share.mixture.shared.mlp.width == 48 // tp


def test_layers_that_predict_several_tokens_are_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(1)
    own = {name: value for name, value in GLM.items() if name != "architectures"} | {"num_hidden_layers": 2}
    directory = make_tiny(tmp_path, "Glm4MoeForCausalLM", **own)
    edit_config(directory, {"num_nextn_predict_layers": 1})
    expected = logits_of(directory, TOKENS, torch.float32)
    file = directory / "model.safetensors"
    more = {
        name.replace("layers.1.", "layers.2."): value for name, value in load_file(file).items() if "layers.1" in name
    }
    more |= {"model.layers.2.eh_proj.weight": torch.randn(4, 8), "mtp.fc.weight": torch.randn(4, 8)}
    save_file(load_file(file) | more, file, {"format": "pt"})
    with torch.inference_mode():
        assert torch.equal(logits_of(directory, TOKENS, torch.float32), expected)
    spec = read_spec(directory)
    with caplog.at_level(logging.INFO):
        specs = weight_specs_of(undivided_layers(spec, TensorOptions(torch.device("cpu"), torch.float32)))
        open_checkpoint(Config().with_values(model=str(directory)), spec, specs).close()
    assert f"one token is predicted at a time: layer 2, mtp ({len(more)} tensors) left out" in caplog.text
    edit_config(directory, {"num_nextn_predict_layers": 0})
    with pytest.raises(CheckpointError, match=r"layers\.2\..*no such weight"):
        logits_of(directory, TOKENS, torch.float32)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_names_and_stacks_that_transformers_has_in_memory_are_read(architecture: str, tmp_path: Path) -> None:
    """As tools save them that do not know what published checkpoints have."""
    import transformers

    torch.set_num_threads(1)
    row = SHAPE | ROWS[architecture] | {"architecture": architecture}
    directory = make_tiny(tmp_path, **row)
    edit_config(directory, {"architectures": [architecture]})
    expected = logits_of(directory, TOKENS, torch.float32)
    model = getattr(transformers, architecture).from_pretrained(directory, dtype=torch.float32)
    file = directory / "model.safetensors"
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    state = {name: value.contiguous() for name, value in model.state_dict().items() if name not in tied}
    assert any(name.endswith(("experts.gate_up_proj", "experts.up_proj")) for name in state)
    save_file(state, file, {"format": "pt"})
    assert torch.equal(logits_of(directory, TOKENS, torch.float32), expected)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_experts_are_quantized_and_routers_are_not(architecture: str, tmp_path: Path) -> None:
    row = SHAPE | ROWS[architecture] | {"architecture": architecture}
    directory = make_tiny(tmp_path, **row)
    edit_config(directory, {"architectures": [architecture]})
    spec = read_spec(directory, "fp8")
    layers = undivided_layers(spec, TensorOptions(torch.device("cpu"), torch.float32))
    named = {name.removesuffix(".weight") for name in (each.name for each in weight_specs_of(layers))}
    modules = spec.family.modules
    assert spec.quantization
    routers = {name for name in named if name.endswith((modules.router, modules.shared_gate))}
    shared = {name for name in named if name.endswith((*modules.shared_up, modules.shared_down))}
    gated = spec.mixture is not None and spec.mixture.shared is not None and spec.mixture.shared.gated
    assert len(routers) == spec.layers_with_experts * (2 if gated else 1)
    assert bool(shared) == bool(spec.mixture and spec.mixture.shared)
    assert not any(spec.quantization.format_of(name) for name in routers)
    assert all(spec.quantization.format_of(name) for name in shared)
