"""Keys of config files that are absent, or null: each means what it means to the library that writes the file."""

from __future__ import annotations

import json
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from quire.errors import CheckpointError
from quire.models.families.registry import FAMILIES, NATIVE
from quire.models.lora.settings import read_settings
from quire.models.quantization.parsers import read_quantization
from quire.models.spec import read_spec
from quire.text.generation_config import eos_ids
from tests.checkpoints import TINY
from tests.models_sweep.pooled_rows import POOLED_ROWS
from tests.models_sweep.rows import ROWS, SHAPE

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
"""Without these a file is broken, though transformers has defaults: they are refused, or contradict the weights."""
WIDER: dict[str, dict[str, Any]] = {
    "GPTJForCausalLM": {"hidden_size": 256},
    "Zamba2ForCausalLM": {"num_hidden_layers": 54, "layers_block_type": None},
}
"""Sizes that fit a class's defaults: heads as wide as what is rotated of them, as many layers as kinds of layers."""
NEEDED: dict[str, dict[str, int]] = {
    "Dots1ForCausalLM": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "BambaForCausalLM": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2},
    "FalconH1ForCausalLM": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "GraniteMoeHybridForCausalLM": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2},
}
"""More sizes, without which a file of this architecture is broken."""
ENCODERS = ["BertModel", "XLMRobertaForSequenceClassification", "DistilBertModel", "ElectraModel", "AlbertModel"]
ENCODERS += ["ModernBertForSequenceClassification", "NomicBertModel", "GteModel", "EuroBertModel", "Gemma3TextModel"]
TOKENS = ("bos_token_id", "eos_token_id")
"""Where no file has one, the tokenizer's counts, and no class's default."""


def spec_of(directory: Path, config: dict[str, Any]) -> Any:
    (directory / "config.json").write_text(json.dumps(config))
    return read_spec(directory)


def spec_or_refusal(directory: Path, config: dict[str, Any]) -> Any:
    try:
        return spec_of(directory, config)
    except CheckpointError as error:
        return error


@pytest.fixture
def _configs_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers writes out each config that it reads, for a log that nobody keeps."""
    from transformers import PreTrainedConfig

    monkeypatch.setattr(PreTrainedConfig, "__repr__", object.__repr__)


@pytest.mark.usefixtures("_configs_are_not_printed")
@pytest.mark.parametrize("kind", ["absent", "null"])
@pytest.mark.parametrize("architecture", [name for name in FAMILIES if "like" not in ROWS[name]] + ENCODERS)
def test_every_key_of_config_json_means_what_it_means_to_transformers(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    import transformers
    from transformers import AutoConfig

    rows, sizes = ROWS | POOLED_ROWS, NEEDED.get(architecture, {})
    other = WIDER.get(architecture, {})
    described = (
        getattr(transformers, architecture).config_class(**TINY | SHAPE | rows[architecture] | sizes | other).to_dict()
    )
    described |= {"architectures": [architecture]}
    given = [NATIVE[architecture].names.get(size, size) for size in SIZES]
    names = sizes.keys() | {name for each in given for name in ([each] if isinstance(each, str) else each)}
    compared, whole = 0, spec_or_refusal(tmp_path, described)
    for key in described.keys() - names - set(TOKENS) - {"architectures", "model_type", "dtype"}:
        changed = {name: value for name, value in described.items() if name != key}
        changed |= {key: None} if kind == "null" else {}
        ours = spec_or_refusal(tmp_path, changed)
        try:
            theirs = AutoConfig.from_pretrained(tmp_path).to_dict() | {"architectures": [architecture]}
        except Exception:
            assert kind == "null", f"{key}: transformers has a default for each absent key"
            continue
        expected = whole if theirs == described else spec_or_refusal(tmp_path, theirs)
        if isinstance(ours, CheckpointError) or isinstance(expected, CheckpointError):
            assert type(ours) is type(expected), f"{key} {kind}: {ours}, {expected}"
            continue
        differing = [f.name for f in fields(ours) if getattr(ours, f.name) != getattr(expected, f.name)]
        assert not differing, f"{key} {kind}: {differing}"
        compared += 1
    assert compared > 5


@pytest.mark.parametrize(
    ("architecture", "key", "attribute", "absent"),
    [
        ("MistralForCausalLM", "sliding_window", "attention.window", 4096),
        ("Gemma2ForCausalLM", "attn_logit_softcapping", "attention.cap", 50.0),
        ("Gemma2ForCausalLM", "final_logit_softcapping", "logit_cap", 30.0),
    ],
)
def test_null_is_a_value_where_there_may_be_no_such_thing(
    architecture: str, key: str, attribute: str, absent: float, tmp_path: Path
) -> None:
    import transformers

    described = getattr(transformers, architecture).config_class(**TINY).to_dict() | {"architectures": [architecture]}
    assert attrgetter(attribute)(spec_of(tmp_path, described | {key: None})) is None
    del described[key]
    assert attrgetter(attribute)(spec_of(tmp_path, described)) == absent


WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
GROUPS = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}}}
DESCRIBED: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "bitsandbytes": {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": "uint8", "bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": ["lm_head"],
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        **GROUPS,
    },
}  # fmt: skip
OPTIONAL = {
    "gptq": ("group_size", "sym", "desc_act", "checkpoint_format", "lm_head", "dynamic", "modules_to_not_convert"),
    "awq": ("bits", "group_size", "zero_point", "version", "modules_to_not_convert"),
    "fp8": ("activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers"),
    "bitsandbytes": (
        "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_quant_storage", "bnb_4bit_use_double_quant",
        "llm_int8_skip_modules",
    ),
    "compressed-tensors": ("ignore", "sparsity_config", "transform_config", "kv_cache_scheme"),
}  # fmt: skip


@pytest.mark.parametrize(("method", "key"), [(method, key) for method, keys in OPTIONAL.items() for key in keys])
def test_a_null_in_quantization_config_is_as_if_its_key_were_absent(method: str, key: str) -> None:
    absent = {name: value for name, value in DESCRIBED[method].items() if name != key}
    assert read_quantization(absent | {key: None}, None) == read_quantization(absent, None)


@pytest.mark.parametrize("key", ["symmetric", "strategy", "group_size", "actorder", "dynamic", "type"])
def test_a_null_in_a_group_is_as_if_its_key_were_absent(key: str) -> None:
    def read(weights: dict[str, Any]) -> Any:
        described = DESCRIBED["compressed-tensors"] | {
            "config_groups": {"a": {"targets": ["Linear"], "weights": weights}}
        }
        try:
            return read_quantization(described, None)
        except CheckpointError as error:
            return error.message

    absent = {name: value for name, value in WEIGHTS.items() if name != key}
    assert read(absent | {key: None}) == read(absent)
    if key != "group_size":
        assert read(absent) == read_quantization(DESCRIBED["compressed-tensors"], None)


def test_what_gptq_leaves_out_is_its_default() -> None:
    from transformers import GPTQConfig

    theirs = GPTQConfig(bits=4)
    usual = {"bits": 4, "group_size": theirs.group_size, "sym": theirs.sym, "desc_act": theirs.desc_act}
    assert read_quantization({"quant_method": "gptq", "bits": 4}, None) == read_quantization(
        {"quant_method": "gptq", **usual}, None
    )


ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
ADAPTER_KEYS = (
    "bias", "init_lora_weights", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora",
    "modules_to_save", "lora_bias",
    "trainable_token_indices", "layers_to_transform", "target_modules", "fan_in_fan_out", "revision", "megatron_config",
)  # fmt: skip


@pytest.mark.parametrize("key", ADAPTER_KEYS)
def test_a_null_in_adapter_config_is_as_if_its_key_were_absent(key: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    absent = read_settings(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER | {key: None}))
    assert read_settings(tmp_path) == absent


@pytest.mark.parametrize(
    "files", [{}, {"generation_config": {"eos_token_id": None}}, {"config": {"eos_token_id": None}}]
)
def test_an_end_that_no_file_names_is_the_tokenizers(files: dict[str, Any], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert eos_ids(tmp_path, 7) == (7,)
    (tmp_path / "config.json").write_text(
        json.dumps({"eos_token_id": None, "text_config": {"eos_token_id": [3, True]}})
    )
    assert eos_ids(tmp_path, 7) == (3, 7)
