"""A tiny configuration of every architecture that has a family, in a shape that two ranks can divide.

`make test-models` runs them all, and writes docs/models.md. An architecture with a new term has a case in
tests/parity/cases.py too, which every `make test` runs.
"""

from __future__ import annotations

from typing import Any

from tests.checkpoints import LLAMA3_ROPE

SHAPE: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "vocab_size": 321,
}
"""What rows have unless they say otherwise. The vocabulary is divided with a remainder."""
_WINDOW = {"sliding_window": 13, "num_hidden_layers": 4}
_MIXTURE = {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
_LIKE_DEEPSEEK = _MIXTURE | {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}

_FEW_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.15,
    "logits_scaling": 2.0,
}

ROWS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 45},
    "MixtralForCausalLM": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    "Qwen3ForCausalLM": {"head_dim": 32},
    "Qwen3MoeForCausalLM": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "head_dim": 16,
    },
    "GptOssForCausalLM": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "swiglu_limit": 0.6,
        "num_hidden_layers": 4,
    },
    "Phi3ForCausalLM": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    "Gemma2ForCausalLM": _WINDOW
    | {"head_dim": 32, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "Gemma3ForCausalLM": _WINDOW
    | {
        "head_dim": 32,
        "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
    "GraniteForCausalLM": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.15,
        "logits_scaling": 2.0,
    },
    "GraniteSWAForCausalLM": {
        "num_hidden_layers": 5,
        "sliding_window": 13,
        "layer_rope_theta": [1e4, 1e6, 0, 1e4, 0],
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.15,
        "logits_scaling": 2.0,
    },
    "HyperCLOVAXForCausalLM": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.15,
        "logits_scaling": 0.5,
    },
    "SmolLM3ForCausalLM": {"num_hidden_layers": 4},
    "SeedOssForCausalLM": {"head_dim": 16, "attention_out_bias": True},
    "CwmForCausalLM": _WINDOW | {"num_hidden_layers": 5, "head_dim": 16, "rope_parameters": LLAMA3_ROPE},
    "MinistralForCausalLM": _WINDOW
    | {"head_dim": 16, "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    "ArceeForCausalLM": {"mlp_bias": True},
    "ApertusForCausalLM": {"rope_parameters": LLAMA3_ROPE, "dtype": "float32"},
    "NemotronForCausalLM": {"attention_bias": True, "mlp_bias": True},
    "Jais2ForCausalLM": {},
    "StableLmForCausalLM": {"use_parallel_residual": True, "use_qkv_bias": True, "qk_layernorm": True},
    "Starcoder2ForCausalLM": {"sliding_window": 45},
    "Exaone4ForCausalLM": _WINDOW | {"sliding_window_pattern": 4},
    "PhiForCausalLM": {"qk_layernorm": True},
    "PersimmonForCausalLM": {},
    "CodeGenForCausalLM": {"rotary_dim": 8},
    "NanoChatForCausalLM": {"final_logit_softcapping": 5.0},
    "GemmaForCausalLM": {"head_dim": 32},
    "VaultGemmaForCausalLM": _WINDOW
    | {"head_dim": 32, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "GPTBigCodeForCausalLM": {"multi_query": True},
    "GPTNeoXForCausalLM": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "FalconForCausalLM": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "GPTNeoForCausalLM": {
        "num_hidden_layers": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 20,
    },
    "OPTForCausalLM": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "BioGptForCausalLM": {},
    "LLaMAForCausalLM": {"like": "LlamaForCausalLM"},
    "AquilaForCausalLM": {"like": "LlamaForCausalLM"},
    "XverseForCausalLM": {"like": "LlamaForCausalLM"},
    "InternLM2ForCausalLM": {"like": "LlamaForCausalLM"},
    "InternLM3ForCausalLM": {"like": "Qwen2ForCausalLM"},
    "ExaoneForCausalLM": {"like": "LlamaForCausalLM", "head_dim": 32},
    "MiniCPMForCausalLM": {
        "like": "GraniteForCausalLM",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.25,
        "logits_scaling": 4.0,
        "tie_word_embeddings": True,
    },
    "OrionForCausalLM": {
        "like": "StableLmForCausalLM",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
    "GPT2LMHeadModel": {"n_inner": 96},
    "CohereForCausalLM": {"use_qk_norm": True, "logit_scale": 0.3},
    "Cohere2ForCausalLM": _WINDOW | {"logit_scale": 0.3},
    "GlmForCausalLM": {"head_dim": 24},
    "Glm4ForCausalLM": {"head_dim": 16},
    "OlmoForCausalLM": {"clip_qkv": 0.4},
    "Olmo2ForCausalLM": {},
    "Olmo3ForCausalLM": _WINDOW
    | {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "factor": 8.0,
                "rope_theta": 5e5,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        }
    },
    "Ernie4_5ForCausalLM": {"head_dim": 16, "use_bias": True},
    "Ministral3ForCausalLM": {
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 8.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "HunYuanDenseV1ForCausalLM": {
        "head_dim": 20,
        "rope_parameters": {"rope_type": "dynamic", "alpha": 100.0, "factor": 1.0, "rope_theta": 1e4},
    },
    "HeliumForCausalLM": {"head_dim": 16, "attention_bias": True},
    "GPTJForCausalLM": {"rotary_dim": 8, "n_inner": 96},
    "Qwen2MoeForCausalLM": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
    "Glm4MoeForCausalLM": _LIKE_DEEPSEEK | {"use_qk_norm": True, "attention_bias": True},
    "Dots1ForCausalLM": _LIKE_DEEPSEEK | {"sliding_window": 11, "max_window_layers": 1},
    "HYV3ForCausalLM": _MIXTURE | {"num_experts": 8, "num_shared_experts": 2, "router_scaling_factor": 1.7},
    "OlmoeForCausalLM": {"num_experts": 8, "num_experts_per_tok": 3},
    "FlexOlmoForCausalLM": {"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "GraniteMoeForCausalLM": _GRANITE | _FEW_EXPERTS,
    "GraniteMoeSharedForCausalLM": _GRANITE | _FEW_EXPERTS | {"shared_intermediate_size": 40},
    "ExaoneMoeForCausalLM": _WINDOW
    | {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 24,
        "n_group": 4,
        "topk_group": 2,
    },
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 24,
        "moe_layer_end_index": 1,
    },
    "HunYuanMoEV1ForCausalLM": {"num_experts": 8, "moe_topk": 3, "head_dim": 16},
    "MiniMaxM2ForCausalLM": _FEW_EXPERTS
    | {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "AfmoeForCausalLM": _WINDOW
    | _MIXTURE
    | {
        "num_experts": 8,
        "num_shared_experts": 2,
        "route_scale": 1.7,
        "mup_enabled": True,
    },
    "Cohere2MoeForCausalLM": _WINDOW
    | {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_shared_experts": 2,
        "head_dim": 16,
        "logit_scale": 0.3,
        "prefix_dense_intermediate_size": 40,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
    "PhimoeForCausalLM": _FEW_EXPERTS | {"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2},
    "Llama4ForCausalLM": {
        "num_local_experts": 6,
        "intermediate_size": 40,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "attention_chunk_size": 16,
        "floor_scale": 8,
        "attn_scale": 0.5,
    },
    "BloomForCausalLM": {},
    "MptForCausalLM": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 512,
        "attn_config": {"clip_qkv": 0.5},
    },
    "LagunaForCausalLM": _WINDOW
    | _MIXTURE
    | {
        "num_experts": 8,
        "shared_expert_intermediate_size": 24,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "moe_router_logit_softcapping": 3.0,
        "moe_routed_scaling_factor": 1.7,
    },
}
"""By `architectures` entry, what differs from SHAPE; `like` names the class that transformers has of it."""
