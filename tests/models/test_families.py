"""Every architecture's config.json and weights: sizes before loading, both generations, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import CheckpointError
from quire.models.rope import angle_scale, frequencies_by_length, rotary_frequencies
from quire.models.rope_spec import RopeSpec
from quire.models.spec import read_spec
from quire.scheduling.kvcache.rope_length_mode import RopeLengthMode
from tests.checkpoints import make_tiny
from tests.models.test_spec import MINIMAL
from tests.parity.cases import CASES

WHOLE = {name: case for name, case in CASES.items() if "shards" not in case}


@pytest.mark.parametrize("case", WHOLE)
def test_memory_is_what_the_files_hold(case: str, tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, **WHOLE[case])
    data = (directory / "model.safetensors").read_bytes()
    assert read_spec(directory).weight_bytes("float32") == len(data) - 8 - int.from_bytes(data[:8], "little")


@pytest.mark.parametrize("case", ["gemma3, 4.x", "qwen3 moe, one expert a token", "llama3 rope", "longrope, phi3, 4.x"])
def test_both_generations_say_the_same(case: str, tmp_path: Path) -> None:
    specs = [read_spec(make_tiny(tmp_path / str(g), **CASES[case] | {"generation": g})) for g in (4, 5)]
    assert specs[0] == specs[1]


@pytest.mark.parametrize("case", [name for name in CASES if "rope" in name])
def test_frequencies_equal_transformers(case: str, tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    directory = make_tiny(tmp_path, **CASES[case])
    rope, head_dim = read_spec(directory).attention.rope, read_spec(directory).attention.head_dim
    assert rope is not None
    config = AutoConfig.from_pretrained(directory)
    for length in (1, 79, 80, 81, 200, 1000):
        theirs, scale = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, seq_len=length)
        torch.testing.assert_close(rotary_frequencies(rope, head_dim, length), theirs, rtol=1e-5, atol=0)
        assert angle_scale(rope) == pytest.approx(scale)
        by_length = frequencies_by_length(rope, head_dim, torch.device("cpu"))
        assert (by_length is None) == (rope.length_mode is None)
        if by_length is not None:
            torch.testing.assert_close(by_length(torch.tensor([7, length]))[1], theirs, rtol=1e-5, atol=0)


def spec_of(directory: Path, architecture: str, **changes: Any) -> Any:
    (directory / "config.json").write_text(json.dumps(MINIMAL | {"architectures": [architecture]} | changes))
    return read_spec(directory)


def test_what_an_architecture_does_where_its_file_is_silent(tmp_path: Path) -> None:
    assert spec_of(tmp_path, "Qwen2ForCausalLM").attention.qkv_bias
    assert not spec_of(tmp_path, "Qwen2ForCausalLM").attention.out_bias
    assert spec_of(tmp_path, "Qwen3ForCausalLM").attention.head_dim == 128
    assert spec_of(tmp_path, "MixtralForCausalLM").ropes == (RopeSpec(1e6),)
    assert spec_of(tmp_path, "MixtralForCausalLM").mixture.routing.renormalise
    assert not spec_of(tmp_path, "Qwen3MoeForCausalLM").mixture.routing.renormalise
    gemma = spec_of(tmp_path, "Gemma2ForCausalLM")
    assert (gemma.attention.cap, gemma.attention.scale) == (50.0, 1 / 16)
    assert (gemma.logit_cap, gemma.tie_embeddings) == (30.0, True)
    gemma = spec_of(tmp_path, "Gemma3ForCausalLM", num_hidden_layers=6)
    assert (gemma.attention.cap, gemma.logit_cap) == (None, None)
    assert [layer.mixer.rope.theta for layer in gemma.layers] == [1e4] * 5 + [1e6]
    gpt2 = spec_of(tmp_path, "GPT2LMHeadModel", n_embd=32, n_head=4, n_positions=64, num_key_value_heads=1)
    assert (gpt2.layers[0].mlp.width, gpt2.attention.kv_heads, gpt2.max_model_len, gpt2.ropes) == (128, 4, 64, ())


def test_longest_sequences(tmp_path: Path) -> None:
    def longest(**rope: Any) -> int:
        spec = spec_of(tmp_path, "LlamaForCausalLM", max_position_embeddings=100, rope_scaling=rope)
        return int(spec.max_model_len)

    assert longest(type="linear", factor=2.5) == 250
    assert longest(type="dynamic", factor=3) == 300
    assert longest(type="yarn", factor=4.0, original_max_position_embeddings=60) == 240
    assert longest(type="yarn", factor=4.0, original_max_position_embeddings=25) == 100


def test_keys_that_depend_on_the_length_are_told_apart() -> None:
    longrope, dynamic = RopeLengthMode(100, "longrope"), RopeLengthMode(100, "dynamic")
    assert longrope.rope_length(40, 120) == 120
    assert dynamic.rope_length(40, 120) == 40
    assert longrope.salt(100) == dynamic.salt(100) == ""
    assert longrope.salt(101) == longrope.salt(500) != ""
    assert len({dynamic.salt(n) for n in (100, 101, 102)}) == 3


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": "vision"}, "'use_bidirectional_attention'"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping'"),
        (
            "Gemma3ForCausalLM",
            {"rope_parameters": {"sliding_attention": {"rope_type": "dynamic", "factor": 2.0}}},
            "sliding_attention scaled by length",
        ),
        ("Gemma2ForCausalLM", {"hidden_activation": "silu_and"}, "'hidden_activation'.*silu_and"),
        ("GPT2LMHeadModel", {"add_cross_attention": True, "n_embd": 32, "n_head": 4}, "'add_cross_attention'"),
        ("GPT2LMHeadModel", {"activation_function": "relu", "n_embd": 32, "n_head": 4}, "'activation_function'.*relu"),
        ("GPT2LMHeadModel", {"n_embd": 0}, "'n_embd'"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "'num_experts_per_tok'.*at most"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [2]}, "'mlp_only_layers'.*below 2"),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": 1}, "'norm_topk_prob'"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor'"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 4}},
            "4 numbers as short_factor",
        ),
    ],
)
def test_refusals_name_the_key(architecture: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        spec_of(tmp_path, architecture, **changes)
