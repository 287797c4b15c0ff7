"""Which module has which format, by --quantization and the checkpoint's own description."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from quire.cli.settings_fields import settings_of
from quire.errors import CheckpointError, ConfigError
from quire.foundation.config import Config
from quire.models.quantization.formats import CodebookFormat, Format, Fp8Format, GroupFormat, Quantization, Rule
from quire.models.quantization.parsers import AT_LOAD, PARSERS, read_quantization
from quire.models.quantization.registry import SCHEMES

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}


def test_nothing_said_is_nothing_quantized() -> None:
    assert read_quantization(None, None) is None


def test_the_flag_quantizes_dense_weights_but_heads_and_routers() -> None:
    found = read_quantization(None, "fp8")
    assert found is not None
    assert found.format_of("model.layers.0.mlp.up_proj") == Fp8Format(at_load=True)
    assert found.format_of("lm_head") is None
    assert found.format_of("model.layers.3.mlp.gate") is None
    assert found.format_of("model.layers.3.mlp.gate_proj") is not None


def test_the_flag_may_repeat_what_the_checkpoint_says() -> None:
    found = read_quantization(AWQ, None)
    assert found == read_quantization(AWQ, "awq") == read_quantization(AWQ, "awq_marlin")
    assert found is not None
    assert found.format_of("model.layers.0.mlp.up_proj") == GroupFormat("awq", 4, 128, symmetric=False)


@pytest.mark.parametrize(
    ("described", "asked", "message"),
    [
        (None, "awq", "--quantization awq.*no quantization_config"),
        (None, "nf3", "--quantization nf3 is not supported: served are awq.*gptq"),
        (AWQ, "gptq", "--quantization gptq.*quantized by awq"),
        (AWQ, "fp8", "--quantization fp8.*quantized by awq"),
    ],
)
def test_a_flag_that_contradicts_is_refused(described: object, asked: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        read_quantization(described, asked)
    assert refused.value.param == "quantization"


def test_help_and_error_list_the_same_methods() -> None:
    with pytest.raises(ConfigError) as refused:
        read_quantization(None, "foo")
    listed = refused.value.message.split("served are ")[1].split(". ")[0].split(", ")
    (help,) = (setting.description for setting in settings_of(Config) if setting.name == "quantization")
    methods = help.split("need not be given: ")[1].rstrip(".").replace(" or ", ", ").split(", ")
    assert methods == listed == sorted({*PARSERS, *AT_LOAD})
    at_start = help.split(" quantize a dense checkpoint")[0]
    assert all(method in at_start for method in AT_LOAD)


@pytest.mark.parametrize(
    "described",
    [
        "x",
        {"quant_method": "gptq"},
        {"quant_method": "awq", "bits": [4]},
        {"quant_method": "compressed-tensors", "config_groups": 3},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"]}}},
        {"quant_method": "compressed-tensors", "config_groups": {}},
        {"quant_method": "compressed-tensors", "config_groups": {"g": None}},
        {"quant_method": "fp8", "weight_block_size": "ab"},
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "X"}}},
        {"group_size": 64, "bits": 4},
    ],
)
def test_a_broken_description_is_a_refusal(described: object) -> None:
    with pytest.raises(CheckpointError, match="quantization_config"):
        read_quantization(described, None)


def test_rules_name_modules_patterns_or_all() -> None:
    four, eight = (GroupFormat("compressed-tensors", bits, 128, True) for bits in (4, 8))
    rules = (Rule(("re:.*down_proj$",), eight), Rule(("Linear",), four))
    found = Quantization("x", rules, ("re:.*layers\\.0\\..*", "model.layers.1.self_attn.q_proj"), head=True)
    assert found.format_of("model.layers.0.mlp.down_proj") is None
    assert found.format_of("model.layers.1.mlp.down_proj") == eight
    assert found.format_of("model.layers.1.self_attn.q_proj") is None
    assert found.format_of("model.layers.1.self_attn.k_proj") == four
    assert found.format_of("lm_head") == four


def test_modelopt_names_the_modules_of_each_format() -> None:
    """As Qwen 3.6's NVFP4 checkpoints do: an entry is a module, or holds all experts of a layer."""
    layers = {
        "model.language_model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.language_model.layers.3.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "lm_head": {"quant_algo": "NVFP4", "group_size": 16},
    }
    described = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": ["mtp*"]}
    found = read_quantization(described, "modelopt")
    assert found is not None
    four = CodebookFormat("modelopt", "e2m1", 16)
    assert found.format_of("model.layers.3.self_attn.q_proj") == Fp8Format("tensor", input_scale="input_scale")
    assert found.format_of("model.layers.3.mlp.experts.17.down_proj") == found.format_of("lm_head") == four
    for dense in ("model.layers.3.self_attn.q_proj_b", "model.layers.30.mlp.experts.0.down_proj", "model.layers.3.mlp"):
        assert found.format_of(dense) is None


@pytest.mark.parametrize("dense", ["backbone.layers.5.mixer.q_proj", "backbone.layers.5.mixer*"])
def test_older_names_of_modules_are_the_models(dense: str) -> None:
    """Nemotron 3's checkpoints say "backbone", the model "model"."""
    found = read_quantization({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [dense]}, None)
    assert found is not None
    assert found.format_of("model.layers.5.mixer.q_proj") is not None
    renamed = found.renamed((("backbone.", "model."),))
    assert renamed.format_of("model.layers.5.mixer.q_proj") is None
    assert renamed.format_of("model.layers.6.mixer.q_proj") is not None


def test_the_documented_table_names_every_method_and_no_other() -> None:
    text = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text()
    table = text.partition("## What is served")[2].partition('\n\n"Reference"')[0]
    cells = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")][1:]
    named = {name for cell in cells for name in re.findall(r"`([^`]+)`", re.sub(r"\(.*?\)", "", cell))}
    methods = {name for name in named if " " not in name}
    at_load = {name.removeprefix("--quantization ") for name in named if name.startswith("--quantization ")}
    assert methods == set(PARSERS)
    assert at_load == set(AT_LOAD)


def test_every_format_has_a_scheme() -> None:
    assert set(SCHEMES) == set(get_args(Format))
