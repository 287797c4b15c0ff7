"""Gemma 3n, Gemma 4, MiMo-V2 and Step 3.5: what their files may say, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import CheckpointError, ConfigError
from quire.models.rank_spec import check_pipeline_parallel_size
from quire.models.spec import read_spec
from quire.models.weights.safetensors_files import SINGLE
from tests.checkpoints import edit_config, make_tiny
from tests.models.forward import logits_of
from tests.models_sweep.renamed import make_renamed
from tests.models_sweep.rows import ROWS, SHAPE

TOKENS = torch.arange(3, 33)


def make(directory: Path, architecture: str) -> Path:
    shape = SHAPE | ROWS[architecture]
    if like := shape.pop("like", None):
        return make_renamed(directory, architecture, like, shape)[0]
    return make_tiny(directory, architecture, **shape)


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("Gemma4ForCausalLM", {"per_layer_config": {"1": {"hidden_size": 8}}}, "'per_layer_config'.*head_dim"),
        ("Gemma4ForCausalLM", {"per_layer_config": [16] * 6}, "'per_layer_config'.*by layer"),
        ("Gemma4ForCausalLM", {"num_kv_shared_layers": 5}, "'num_kv_shared_layers'.*no layer of a kind"),
        ("Gemma4ForCausalLM", {"use_bidirectional_attention": "all"}, "'use_bidirectional_attention' is 'all'"),
        (
            "Gemma4ForCausalLM",
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
            "'top_k_experts' is 5.*num_experts",
        ),
        ("Gemma3nForCausalLM", {"altup_active_idx": 1}, "'altup_active_idx' is 1"),
        ("Gemma3nForCausalLM", {"altup_correct_scale": False}, "'altup_correct_scale' is False"),
        ("Gemma3nForCausalLM", {"activation_sparsity_pattern": [0.5]}, "'activation_sparsity_pattern'.*6 numbers"),
        ("Gemma3nForCausalLM", {"intermediate_size": [96, 80, 96, 96, 96, 96]}, "'intermediate_size'.*all layers"),
        ("MiMoV2FlashForCausalLM", {"v_head_dim": 32}, "'v_head_dim' is 32.*head_dim"),
        ("MiMoV2FlashForCausalLM", {"num_key_value_heads": 4}, "'num_key_value_heads' is 4.*twice"),
        ("LagunaForCausalLM", {"num_attention_heads_per_layer": [4, 8]}, "'num_attention_heads_per_layer'.*each layer"),
        ("Step3p5ForCausalLM", {"swiglu_limits": [0.0]}, "'swiglu_limits'.*each layer"),
        ("Step3p5ForCausalLM", {"moe_layers_enum": "1,x", "mlp_layer_types": None}, "'moe_layers_enum'.*numbers"),
        ("Step3p5ForCausalLM", {"attention_other_setting": {"head_dim": 8}}, "'attention_other_setting'.*head_dim"),
        ("Step3p5ForCausalLM", {"moe_router_activation": "softmax"}, "'moe_router_activation' is 'softmax'"),
    ],
)
def test_what_is_not_served_is_refused(architecture: str, keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = make(tmp_path, architecture)
    edit_config(directory, keys)
    with pytest.raises(CheckpointError, match=message):
        read_spec(directory)


def test_widths_are_those_of_files_of_either_generation(tmp_path: Path) -> None:
    make(tmp_path, "Gemma4ForCausalLM")
    spec = read_spec(tmp_path)

    def as_published(config: dict[str, Any]) -> None:
        del config["per_layer_config"]
        config |= {"global_head_dim": 32, "num_global_key_value_heads": 2}

    edit_config(tmp_path, as_published)
    assert read_spec(tmp_path) == spec
    edit_config(tmp_path, {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"] * 2})
    assert read_spec(tmp_path).layers[-1] == spec.layers[-1]  # it sees everything, whatever the file says


def test_keys_of_layers_that_read_others_are_left_out(tmp_path: Path) -> None:
    """Published files have them, although no implementation reads them."""
    directory = make(tmp_path, "Gemma4ForCausalLM")
    expected, stored = logits_of(directory, TOKENS, torch.float32), load_file(tmp_path / SINGLE)
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    unread = {f"model.layers.{layer}.self_attn.{name}.weight": torch.ones(3) for layer in (4, 5) for name in names}
    assert not unread.keys() & stored.keys()
    save_file(stored | unread, tmp_path / SINGLE)
    assert torch.equal(logits_of(directory, TOKENS, torch.float32), expected)


@pytest.mark.parametrize("architecture", ["Gemma3nForCausalLM", "Gemma4ForCausalLM"])
def test_stages_of_layers_that_read_others_are_refused(architecture: str, tmp_path: Path) -> None:
    make(tmp_path, architecture)
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size 2.*--tensor-parallel-size"):
        check_pipeline_parallel_size(read_spec(tmp_path), 2)
