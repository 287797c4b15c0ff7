"""What config.json says in well-known checkpoints: each is served, with as many weights as its model card says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.models.spec import read_spec


def shape(architecture: str, *sizes: int, **rest: Any) -> dict[str, Any]:
    keys = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings",
    )  # fmt: skip
    return {"architectures": [architecture]} | dict(zip(keys, sizes, strict=True)) | rest


LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "head_dim": 256}
PUBLISHED: dict[str, tuple[dict[str, Any], int, int, list[int | None]]] = {
    "Llama-3.1-8B": (
        shape("LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 131072, pretraining_tp=1, tie_word_embeddings=False),
        8_030_261_248, 131072, [None],
    ),
    "Mistral-7B-v0.1": (
        shape("MistralForCausalLM", 32000, 4096, 14336, 32, 32, 8, 32768, sliding_window=4096),
        7_241_732_096, 32768, [4096],
    ),
    "Qwen2.5-7B": (
        shape("Qwen2ForCausalLM", 152064, 3584, 18944, 28, 28, 4, 131072, sliding_window=131072,
              use_sliding_window=False, max_window_layers=28, rope_theta=1e6),
        7_615_616_512, 131072, [None],
    ),
    "Qwen3-30B-A3B": (
        shape("Qwen3MoeForCausalLM", 151936, 2048, 6144, 48, 32, 4, 40960, head_dim=128, num_experts=128,
              num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
              mlp_only_layers=[], sliding_window=None, use_sliding_window=False),
        30_532_122_624, 40960, [None],
    ),
    "Mixtral-8x7B": (
        shape("MixtralForCausalLM", 32000, 4096, 14336, 32, 32, 8, 32768, num_local_experts=8, num_experts_per_tok=2,
              sliding_window=None, output_router_logits=False),
        46_702_792_704, 32768, [None],
    ),
    "Phi-3.5-mini": (
        shape("Phi3ForCausalLM", 32064, 3072, 8192, 32, 32, 32, 131072, sliding_window=262144, rope_scaling=LONG,
              original_max_position_embeddings=4096, attention_bias=False),
        3_821_079_552, 131072, [262144],
    ),
    "Phi-4-mini": (
        shape("Phi3ForCausalLM", 200064, 3072, 8192, 32, 24, 8, 131072, sliding_window=262144, rope_scaling=LONG,
              original_max_position_embeddings=4096, partial_rotary_factor=0.75, tie_word_embeddings=True),
        3_836_021_760, 131072, [262144],
    ),
    "Gemma-2-9B": (
        shape("Gemma2ForCausalLM", 256000, 3584, 14336, 42, 16, 8, 8192, sliding_window=4096,
              query_pre_attn_scalar=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, **GEMMA),
        9_241_705_984, 8192, [4096, None],
    ),
    "Gemma-3-1B": (
        shape("Gemma3ForCausalLM", 262144, 1152, 6912, 26, 4, 1, 32768, sliding_window=512, sliding_window_pattern=6,
              rope_local_base_freq=10000, rope_theta=1000000, rope_scaling=None, eos_token_id=[1, 106], **GEMMA),
        999_885_952, 32768, [512] * 6 + [None],
    ),
    "GPT-2": (
        {"architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
         "n_ctx": 1024, "vocab_size": 50257, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
        124_439_808, 1024, [None],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str, tmp_path: Path) -> None:
    config, parameters, longest, groups = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    spec = read_spec(tmp_path)
    assert spec.num_parameters == parameters
    assert spec.max_model_len == longest
    assert [group.window for group in spec.kv_groups()] == groups
