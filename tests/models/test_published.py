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
LONG_OF_128 = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.5] * 64}
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
    "Qwen1.5-MoE-A2.7B": (
        shape("Qwen2MoeForCausalLM", 151936, 2048, 5632, 24, 16, 16, 8192, num_experts=60, num_experts_per_tok=4,
              moe_intermediate_size=1408, shared_expert_intermediate_size=5632, norm_topk_prob=False,
              sliding_window=32768, use_sliding_window=False),
        14_315_784_192, 8192, [None],
    ),
    "OLMoE-1B-7B": (
        shape("OlmoeForCausalLM", 50304, 2048, 1024, 16, 16, 16, 4096, num_experts=64, num_experts_per_tok=8,
              clip_qkv=None, norm_topk_prob=False),
        6_919_161_856, 4096, [None],
    ),
    "Granite-3.0-1B-A400M": (
        shape("GraniteMoeForCausalLM", 49155, 1024, 512, 24, 16, 8, 4096, num_local_experts=32, num_experts_per_tok=8,
              tie_word_embeddings=True, attention_multiplier=0.015625, embedding_multiplier=12.0, logits_scaling=6.0,
              residual_multiplier=0.22),
        1_334_628_352, 4096, [None],
    ),
    "Phi-3.5-MoE": (
        shape("PhiMoEForCausalLM", 32064, 4096, 6400, 32, 32, 8, 131072, num_local_experts=16, num_experts_per_tok=2,
              attention_bias=True, lm_head_bias=True, router_jitter_noise=0.01, sliding_window=131072,
              rope_scaling=LONG_OF_128 | {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122,
                                          "original_max_position_embeddings": 4096}),
        41_873_153_344, 131072, [131072],
    ),
    "gpt-oss-20b": (
        shape("GptOssForCausalLM", 201088, 2880, 2880, 24, 64, 8, 131072, head_dim=64, num_local_experts=32,
              num_experts_per_tok=4, sliding_window=128, swiglu_limit=7.0),
        20_914_757_184, 131072, [128, None],
    ),
    "gpt-oss-120b": (
        shape("GptOssForCausalLM", 201088, 2880, 2880, 36, 64, 8, 131072, head_dim=64, num_local_experts=128,
              num_experts_per_tok=4, sliding_window=128, swiglu_limit=7.0),
        116_829_156_672, 131072, [128, None],
    ),
    "GLM-4.5-Air": (
        shape("Glm4MoeForCausalLM", 151552, 4096, 10944, 46, 96, 8, 131072, head_dim=128, n_routed_experts=128,
              num_experts_per_tok=8, moe_intermediate_size=1408, n_shared_experts=1, first_k_dense_replace=1,
              attention_bias=True, use_qk_norm=False, partial_rotary_factor=0.5, num_nextn_predict_layers=1,
              n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0),
        106_852_251_264, 131072, [None],
    ),
    "MiniMax-M2": (
        shape("MiniMaxM2ForCausalLM", 200064, 3072, 1536, 62, 48, 8, 196608, head_dim=128, num_local_experts=256,
              num_experts_per_tok=8, rotary_dim=64, scoring_func="sigmoid", use_qk_norm=True, use_routing_bias=True,
              shared_intermediate_size=0),
        228_689_764_864, 196608, [None],
    ),
    "ERNIE-4.5-21B-A3B": (
        shape("Ernie4_5_MoeForCausalLM", 103424, 2560, 12288, 28, 20, 4, 131072, moe_num_experts=64, moe_k=6,
              moe_num_shared_experts=2, moe_intermediate_size=1536, moe_layer_start_index=1, tie_word_embeddings=True),
        21_825_437_888, 131072, [None],
    ),
    "Hunyuan-A13B": (
        shape("HunYuanMoEV1ForCausalLM", 128167, 4096, 3072, 32, 32, 8, 32768, head_dim=128, num_experts=64,
              moe_topk=[8] * 32, moe_intermediate_size=[3072] * 32, tie_word_embeddings=True),
        80_393_183_232, 32768, [None],
    ),
    "Hunyuan-3": (
        shape("HYV3ForCausalLM", 120832, 4096, 13312, 80, 64, 8, 131072, num_experts=192, num_experts_per_tok=8,
              moe_intermediate_size=1536),
        295_033_543_488, 131072, [None],
    ),
    "Llama-4-Scout": (
        {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {"model_type": "llama4_text"}},
        107_769_861_120, 131072, [8192] * 3 + [None],
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
    assert [group.window or group.chunk for group in spec.kv_groups()] == groups
