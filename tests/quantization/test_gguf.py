"""GGUF models: every type and every family has the logits of the weights that the `gguf` package reads in the file, in
transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.compute.gguf.model_files import directory_of
from quire.compute.gguf.tensor_types import QUANTIZED
from quire.errors import CheckpointError, ConfigError
from quire.models.quantization.gguf_coded import read_coded
from quire.models.quantization.scheme import LinearShape
from quire.models.rope_spec import FactorScaling, RopeSpec
from quire.models.spec import on_a_gpu, read_spec
from quire.models.weights.gguf import GgufCheckpoint
from tests.checkpoints import make_llama, make_tiny
from tests.models.forward import logits_of, logits_of_ranks

made = pytest.importorskip("tests.gguf.made", reason="needs the gguf package")
TOKENS = torch.randint(3, 320, (60,), generator=torch.Generator().manual_seed(4))
WIDE: dict[str, Any] = {"hidden": 256, "intermediate": 512, "layers": 2, "heads": 4, "tokenizer": False}
MIXED = {"": "Q4_K", "v_proj": "Q6_K", "k_proj": "Q8_0", "up_proj": "Q5_0", "lm_head": "Q6_K", "o_proj": "F16"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True, scope="module")
def _kernels_before_the_cache_moves() -> None:
    from quire.compute.kernels.cpu.library import library

    library()


def error(file: Path, dense: Path) -> float:
    """Of our logits in fp32 beside transformers' with the same weights dense."""
    from transformers import AutoModelForCausalLM

    ours = logits_of(directory_of([file], tokenizer=False), TOKENS, torch.float32)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
        theirs = model(TOKENS.unsqueeze(0)).logits[0]
    return float(torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs))


@pytest.mark.parametrize("name", [*made.QUANTIZED, "F32", "F16", "BF16"])
@torch.inference_mode()
def test_every_type_is_its_weights(name: str, tmp_path: Path) -> None:
    dense = make_llama(tmp_path / "model", **WIDE, std=0.05)
    file = made.make_gguf(dense, tmp_path / "made" / "model.gguf", name)
    assert error(file, dense) < 1e-3


@torch.inference_mode()
def test_types_differ_within_a_layer(tmp_path: Path) -> None:
    dense = make_llama(tmp_path / "model", **WIDE, attention_bias=True, mlp_bias=True, tie=True, std=0.05)
    file = made.make_gguf(dense, tmp_path / "made" / "model.gguf", MIXED)
    assert error(file, dense) < 1e-3


@pytest.mark.parametrize("types", ["Q8_0", {"": "Q8_0", "lm_head": "Q4_0"}])
@torch.inference_mode()
def test_an_embedding_that_stands_there_twice_is_one(types: Any, tmp_path: Path) -> None:
    dense = make_llama(tmp_path / "model", **WIDE, std=0.05)
    tensors = load_file(dense / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, dense / "model.safetensors")
    file = made.make_gguf(dense, tmp_path / "made" / "model.gguf", types, random=False)
    spec = read_spec(directory_of([file], tokenizer=False))
    assert spec.tie_embeddings == (types == "Q8_0")
    weights = sum(tensor.numel() for name, tensor in tensors.items() if name != "lm_head.weight")
    assert spec.num_parameters == weights + (0 if spec.tie_embeddings else 320 * 256)
    assert error(file, dense) < 1e-3


def test_rotary_factors_are_those_of_every_layer(tmp_path: Path) -> None:
    dense, factors = make_llama(tmp_path / "model", **WIDE), np.arange(1, 33, dtype=np.float32)
    same = {f"blk.{layer}.rope_freqs.weight": factors for layer in (0, 1)}
    file = made.make_gguf(dense, tmp_path / "same.gguf", extra=same)
    assert read_spec(directory_of([file], tokenizer=False)).attention.rope == RopeSpec(
        1e4, FactorScaling(tuple(range(1, 33)))
    )
    file = made.make_gguf(dense, tmp_path / "other.gguf", extra=same | {"blk.1.rope_freqs.weight": factors + 1})
    with pytest.raises(CheckpointError, match=r"'blk\.1\.rope_freqs\.weight' differs"):
        directory_of([file], tokenizer=False)


MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama, rope factors": {
        "architecture": "LlamaForCausalLM",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama, biases, head_dim": {"architecture": "LlamaForCausalLM", "head_dim": 48, "attention_bias": True},
    "llama, linear rope": {
        "architecture": "LlamaForCausalLM",
        "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4},
    },
    "mistral": {"architecture": "MistralForCausalLM", "sliding_window": None, "head_dim": 32},
    "mixtral": {"architecture": "MixtralForCausalLM", **MIXTRAL},
    "qwen2, tied": {"architecture": "Qwen2ForCausalLM", "tie_word_embeddings": True},
    "qwen2, yarn": {"architecture": "Qwen2ForCausalLM", "rope_parameters": YARN},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 64},
    "qwen3 moe": {
        "architecture": "Qwen3MoeForCausalLM",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "head_dim": 32,
    },
    "phi3": {
        "architecture": "Phi3ForCausalLM",
        "sliding_window": 40,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    },
    "phi3, longrope": {
        "architecture": "Phi3ForCausalLM",
        "hidden_size": 128,
        "original_max_position_embeddings": 80,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0 + 0.1 * i for i in range(12)],
            "long_factor": [1.0 + 0.9 * i for i in range(12)],
        },
    },
    "gemma": {"architecture": "GemmaForCausalLM", "head_dim": 32, "tie_word_embeddings": True},
    "granite": {
        "architecture": "GraniteForCausalLM",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.15,
        "logits_scaling": 2.0,
    },
    "olmo2": {"architecture": "Olmo2ForCausalLM"},
    "seed_oss": {"architecture": "SeedOssForCausalLM", "head_dim": 32, "attention_out_bias": True},
    "smollm3": {"architecture": "SmolLM3ForCausalLM", "num_hidden_layers": 4},
    "gemma2": {
        "architecture": "Gemma2ForCausalLM",
        "head_dim": 64,
        "sliding_window": 13,
        "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "num_hidden_layers": 4,
    },
    "gemma3": {
        "architecture": "Gemma3ForCausalLM",
        "head_dim": 32,
        "sliding_window": 19,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 32,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "olmo": {"architecture": "OlmoForCausalLM", "clip_qkv": 1.5},
    "exaone4": {
        "architecture": "Exaone4ForCausalLM",
        "sliding_window": 19,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
    },
    "exaone4, no windows": {
        "architecture": "Exaone4ForCausalLM",
        "sliding_window": None,
        "layer_types": ["full_attention"] * 2,
        "num_hidden_layers": 2,
    },
    "arcee": {"architecture": "ArceeForCausalLM"},
    "nemotron": {"architecture": "NemotronForCausalLM"},
    "stablelm": {"architecture": "StableLmForCausalLM", "use_qkv_bias": True},
    "stablelm, parallel": {"architecture": "StableLmForCausalLM", "use_parallel_residual": True},
    "starcoder2": {"architecture": "Starcoder2ForCausalLM", "sliding_window": None},
    "command-r": {"architecture": "CohereForCausalLM", "logit_scale": 0.3, "use_qk_norm": True},
    "cohere2": {"architecture": "Cohere2ForCausalLM", "logit_scale": 0.3, "sliding_window": 19, "num_hidden_layers": 4},
    "glm4": {"architecture": "Glm4ForCausalLM", "head_dim": 16, "attention_bias": True},
    "ernie4.5": {"architecture": "Ernie4_5ForCausalLM", "head_dim": 16},
    "hunyuan": {"architecture": "HunYuanDenseV1ForCausalLM", "head_dim": 16},
}  # fmt: skip
_ROUTED: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
_LIKE_DEEPSEEK = _ROUTED | {
    "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "num_hidden_layers": 3,
}  # fmt: skip
FAMILIES |= {
    "qwen2 moe": {
        **_ROUTED, "architecture": "Qwen2MoeForCausalLM", "num_experts": 4, "shared_expert_intermediate_size": 64,
    },
    "olmoe": {"architecture": "OlmoeForCausalLM", "num_experts": 4, "num_experts_per_tok": 2},
    "glm4 moe": {**_LIKE_DEEPSEEK, "architecture": "Glm4MoeForCausalLM", "use_qk_norm": True},
    "dots1": {**_LIKE_DEEPSEEK, "architecture": "Dots1ForCausalLM"},
    "ernie4.5 moe": {
        "architecture": "Ernie4_5_MoeForCausalLM", "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 2,
        "moe_intermediate_size": 32, "moe_layer_start_index": 1, "num_hidden_layers": 3,
    },
    "hunyuan moe": {"architecture": "HunYuanMoEV1ForCausalLM", "num_experts": 4, "moe_topk": 2, "head_dim": 16},
    "minimax m2": {
        "architecture": "MiniMaxM2ForCausalLM", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
        "rotary_dim": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", FAMILIES)
@torch.inference_mode()
def test_every_family_is_its_weights(case: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96} | FAMILIES[case]
    dense = make_tiny(tmp_path / "model", **shape)
    file = made.make_gguf(dense, tmp_path / "made" / "model.gguf", {"": "Q8_0", "embed": "Q4_0", "down": "Q5_1"})
    assert error(file, dense) < 1e-3


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    dense = make_tiny(tmp_path / "model", **{"hidden_size": 64} | FAMILIES["glm4 moe"])
    described = {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    head = {"blk.3.nextn.eh_proj.weight": np.zeros((64, 128), np.float32), "blk.3.attn_norm.weight": np.ones(64)}
    extra = {name: value.astype(np.float32) for name, value in head.items()}
    file = made.make_gguf(dense, tmp_path / "made" / "model.gguf", "Q8_0", metadata=described, extra=extra)
    spec = read_spec(directory_of([file], tokenizer=False))
    assert (len(spec.layers), len(spec.mtp_layers)) == (3, 0)
    assert error(file, dense) < 1e-3


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"qwen3moe.expert_shared_count": 1}, "shared experts"),
        ({"qwen3moe.expert_gating_func": 2}, r"expert_gating_func is 2.*served is 1"),
    ],
)
def test_experts_of_another_kind_are_refused(described: dict[str, int], message: str, tmp_path: Path) -> None:
    dense = make_tiny(tmp_path / "model", **{"hidden_size": 64} | FAMILIES["qwen3 moe"])
    file = made.make_gguf(dense, tmp_path / "made" / "model.gguf", "Q8_0", metadata=described)
    with pytest.raises(CheckpointError, match=message):
        directory_of([file], tokenizer=False)


def test_a_description_says_what_a_processor_keeps(tmp_path: Path) -> None:
    dense = make_llama(tmp_path / "model", **WIDE)
    file = made.make_gguf(dense, tmp_path / "made" / "model.gguf", MIXED)
    spec = read_spec(directory_of([file], tokenizer=False))
    assert spec.quantization is not None
    assert spec.quantization.method == "gguf"
    assert "Q4_K" in spec.quantization.rules[0].format.name
    assert spec.weight_bytes("bfloat16") < 0.75 * 2 * spec.num_parameters
    on_gpu = on_a_gpu(spec)
    assert on_gpu.weight_bytes("bfloat16") == pytest.approx(_bytes_on_a_gpu(file), rel=0.03)
    with pytest.raises(ConfigError, match="quantized by gguf"):
        read_spec(directory_of([file], tokenizer=False), "fp8")
    read_spec(directory_of([file], tokenizer=False), "gguf")


def _bytes_on_a_gpu(file: Path) -> int:
    """Of all weights in the forms that a GPU has, and dense ones in bf16."""
    total, checkpoint = 0, GgufCheckpoint(file.parent)
    for name, stored in checkpoint.contents().items():
        if stored.dtype in QUANTIZED and "embed" not in name:
            rows, columns = stored.shape
            shape = LinearShape((name.removesuffix(".weight"),), (rows,), columns)
            weight = read_coded(shape, stored.dtype, checkpoint, torch.device("cpu"))
            total += sum(part.nbytes for part in weight[:3] if isinstance(part, torch.Tensor))
        else:
            total += 2 * math.prod(stored.shape)
    return total


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    dense = make_llama(tmp_path / "model", **WIDE)
    file = made.make_gguf(dense, tmp_path / "made" / "model.gguf", "Q4_K")
    with pytest.raises(CheckpointError, match="tensor-parallel-size"):
        logits_of_ranks(directory_of([file], tokenizer=False), TOKENS, torch.float32, 2)


def test_an_architecture_that_is_not_served_is_named(tmp_path: Path) -> None:
    dense = make_llama(tmp_path / "model", **WIDE)
    file = made.make_gguf(dense, tmp_path / "model.gguf")
    content = file.read_bytes().replace(b"llama", b"mamba")
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"'mamba'.*llama, qwen2"):
        directory_of([file], tokenizer=False)
