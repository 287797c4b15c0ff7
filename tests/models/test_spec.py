"""config.json of both generations of transformers; everything unsupported refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.errors import CheckpointError
from quire.models.families.registry import NATIVE
from quire.models.layer_spec import AttentionSpec, LayerSpec, MlpSpec, NormSpec
from quire.models.rope_spec import Llama3Scaling, RopeSpec
from quire.models.spec import read_spec
from quire.scheduling.kvcache.cache_groups import CacheGroup
from tests.checkpoints import LLAMA3_ROPE, make_llama

MINIMAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def write(directory: Path, **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(MINIMAL | changes))
    return directory


@pytest.mark.parametrize("rope", ["default", "llama3"])
def test_both_generations_say_the_same(rope: Any, tmp_path: Path) -> None:
    specs = [
        read_spec(make_llama(tmp_path / str(g), generation=g, rope=rope, dtype="bfloat16", tokenizer=False))  # type: ignore[arg-type]
        for g in (4, 5)
    ]
    assert specs[0] == specs[1]
    assert specs[0].dtype == "bfloat16"
    assert specs[0].attention.rope == RopeSpec(1e4, Llama3Scaling(8.0, 1.0, 4.0, 64) if rope == "llama3" else None)


def test_every_field(tmp_path: Path) -> None:
    directory = make_llama(tmp_path, heads=4, kv_heads=2, head_dim=24, tie=True, attention_bias=True, eos=[2, 5])
    spec = read_spec(directory)
    attention = AttentionSpec(64, 64, 4, 2, 24, scale=24**-0.5, rope=RopeSpec(1e4), qkv_bias=True, out_bias=True)
    layer = LayerSpec(attention, MlpSpec(64, 112, "silu"), NormSpec("rms", 1e-6, number=2))
    assert spec.layers == (layer,) * 3
    assert (spec.architecture, spec.dtype, spec.vocab_size, spec.hidden) == ("LlamaForCausalLM", "float32", 320, 64)
    assert (spec.norm, spec.max_model_len, spec.tie_embeddings) == (NormSpec("rms", 1e-6), 512, True)
    assert (spec.bos_id, spec.eos_ids) == (0, (2, 5))
    assert spec.kv_groups() == (CacheGroup((0, 1, 2), form=spec.attention.form),)


@pytest.mark.parametrize(
    "flags",
    [{}, {"tie": True}, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 24, "kv_heads": 1}],
)
def test_memory_is_what_the_files_hold(flags: dict[str, Any], tmp_path: Path) -> None:
    directory = make_llama(tmp_path, tokenizer=False, **flags)
    header = (directory / "model.safetensors").read_bytes()
    stored = len(header) - 8 - int.from_bytes(header[:8], "little")
    spec = read_spec(directory)
    assert spec.weight_bytes("float32") == stored
    assert spec.weight_bytes("bfloat16") == stored // 2
    assert spec.kv_bytes_per_token("bfloat16") == 2 * 3 * spec.attention.kv_heads * spec.attention.head_dim * 2


def test_defaults_of_a_minimal_file(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path))
    own = spec.attention
    assert (own.kv_heads, own.head_dim, spec.dtype, own.rope) == (4, 8, "float32", RopeSpec(1e4))
    assert (spec.bos_id, spec.eos_ids, spec.max_model_len) == (None, (), 2048)


def test_old_spellings(tmp_path: Path) -> None:
    scaling = {"type": "llama3"} | {k: v for k, v in LLAMA3_ROPE.items() if k not in ("rope_type", "rope_theta")}
    spec = read_spec(write(tmp_path, torch_dtype="torch.float16", rope_theta=5e5, rope_scaling=scaling))
    assert spec.dtype == "float16"
    assert spec.attention.rope == RopeSpec(5e5, Llama3Scaling(8.0, 1.0, 4.0, 64))
    assert read_spec(write(tmp_path, rope_scaling=None)).attention.rope == RopeSpec(1e4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["RwkvForCausalLM"]}, "'architectures'.*RwkvForCausalLM.*not supported.*LlamaForCausalLM"),
        ({"architectures": None}, "'architectures'"),
        ({"architectures": "LlamaForCausalLM"}, "'architectures'"),
        ({"hidden_act": "relu"}, "'hidden_act'.*relu.*silu"),
        ({"quantization_config": {"quant_method": "flux"}}, "'quantization_config'.*flux.*bf16"),
        ({"quantization_config": "x"}, "'quantization_config'.*x"),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "'rope_scaling'.*'mrope'.*default, linear"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "'rope_scaling'.*factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "'rope_scaling'.*factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": 1}}, "'rope_parameters'.*truncate"),
        ({"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0] * 4}}, "4 numbers as short_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "'rope_parameters'.*differs by layer"),
        ({"rope_parameters": {"rope_type": ["x"]}}, "'rope_parameters'"),
        ({"rope_parameters": 3}, "'rope_parameters'.*object"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor"),
        ({"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 0.5}}, "high_freq_factor"),
        ({"rope_parameters": {"rope_theta": 0}}, "'rope_theta'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor'"),
        ({"sliding_window": 128}, "'sliding_window'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'layer_types'"),
        ({"layer_types": 7}, "'layer_types'"),
        ({"dtype": "float8_e4m3fn"}, "'dtype'.*float8_e4m3fn"),
        ({"dtype": 5}, "'dtype'"),
        ({"llama_4_scaling": {"beta": 0.1}}, "'llama_4_scaling'.*not supported"),
        ({"vocab_size": None}, "'vocab_size'"),
        ({"vocab_size": 0}, "'vocab_size'.*positive"),
        ({"hidden_size": 1.5}, "'hidden_size'"),
        ({"num_hidden_layers": True}, "'num_hidden_layers'"),
        ({"num_key_value_heads": 3}, "'num_key_value_heads'.*divide.*4"),
        ({"head_dim": 7}, "'head_dim'.*even"),
        ({"rms_norm_eps": "1e-5"}, "'rms_norm_eps'"),
        ({"attention_bias": 1}, "'attention_bias'"),
        ({"eos_token_id": "</s>"}, "'eos_token_id'"),
        ({"eos_token_id": [1, -2]}, "'eos_token_id'"),
    ],
)
def test_refusals_name_the_key(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_spec(write(tmp_path, **changes), None, "quire")


def test_sliding_window_that_is_switched_off_is_none(tmp_path: Path) -> None:
    read_spec(write(tmp_path, sliding_window=4096, use_sliding_window=False, layer_types=["full_attention"] * 2))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\udcff"])
def test_broken_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match="download it again"):
        read_spec(tmp_path)


def test_modelopt_may_say_in_a_file_of_its_own_what_is_quantized(tmp_path: Path) -> None:
    directory = write(tmp_path)
    file = directory / "hf_quant_config.json"
    file.write_text('{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": []}}')
    found = read_spec(directory).quantization
    assert found is not None
    assert (found.method, found.rules[0].format.name) == ("modelopt", "fp8 with scales by tensor")
    file.write_text('{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}')
    assert read_spec(directory).quantization is None
    for broken in ("{", "[]", '{"quantization": 3}'):
        file.write_text(broken)
        with pytest.raises(CheckpointError, match=r"hf_quant_config\.json does not say"):
            read_spec(directory)


def test_mlx_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"MLX's.*bf16 checkpoint"):
        read_spec(write(tmp_path, quantization={"group_size": 64, "bits": 4}))


def test_a_directory_without_config_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_spec(tmp_path)
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"only Mistral's params\.json.*Hugging Face layout"):
        read_spec(tmp_path)


def test_every_listed_architecture_exists() -> None:
    import importlib

    for family in NATIVE.values():
        module, name = family.decoder.split(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_reading_a_spec_loads_no_torch() -> None:
    code = "import sys, quire.models.spec, quire.models.weights.hub; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
