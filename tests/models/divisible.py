"""Checkpoints, one of each kind of layer, that two and four ranks can divide: 8 query heads, and fewer, as many or more
KV heads than ranks.
"""

from __future__ import annotations

from typing import Any

_SHAPE: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 321,
}
"""The vocabulary is divided with a remainder."""

DIVISIBLE: dict[str, dict[str, Any]] = {
    "llama, biases": _SHAPE
    | {
        "architecture": "LlamaForCausalLM",
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "shards": "60KB",
    },
    "llama, one kv head": _SHAPE | {"architecture": "LlamaForCausalLM", "num_key_value_heads": 1},
    "mistral, window": _SHAPE | {"architecture": "MistralForCausalLM", "sliding_window": 45},
    "qwen2, tied": _SHAPE | {"architecture": "Qwen2ForCausalLM", "tie_word_embeddings": True},
    "qwen3": _SHAPE | {"architecture": "Qwen3ForCausalLM", "num_key_value_heads": 8},
    "mixtral": _SHAPE | {"architecture": "MixtralForCausalLM", "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3 moe": _SHAPE
    | {
        "architecture": "Qwen3MoeForCausalLM",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
    },
    "gemma4": _SHAPE
    | {
        "architecture": "Gemma4ForCausalLM",
        "std": 0.1,  # products of queries and keys are not scaled, so wide weights make differences large
        "num_key_value_heads": 4,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 45,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "glm4 moe": _SHAPE
    | {
        "architecture": "Glm4MoeForCausalLM",
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 2.5,
        "num_hidden_layers": 3,
    },
    "deepseek v2": _SHAPE
    | {
        "architecture": "DeepseekV2ForCausalLM",
        "num_key_value_heads": 8,
        "head_dim": 8,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 5,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
    },
    "gpt-oss": _SHAPE
    | {
        "architecture": "GptOssForCausalLM",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 45,
        "swiglu_limit": 0.6,
        "num_hidden_layers": 3,
    },
    "phi3": _SHAPE | {"architecture": "Phi3ForCausalLM", "hidden_size": 128},
    "gemma2": _SHAPE
    | {
        "architecture": "Gemma2ForCausalLM",
        "sliding_window": 13,
        "query_pre_attn_scalar": 100,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "num_hidden_layers": 4,
    },
    "gemma3": _SHAPE
    | {
        "architecture": "Gemma3ForCausalLM",
        "sliding_window": 19,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 30,
    },
    "gpt2": {"architecture": "GPT2LMHeadModel", "n_inner": 96, "hidden_size": 64, "num_attention_heads": 8},
    "gpt2, untied": {
        "architecture": "GPT2LMHeadModel",
        "n_inner": 96,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "tie_word_embeddings": False,
    },
    "olmo2": _SHAPE | {"architecture": "Olmo2ForCausalLM", "head_dim": 8},
    "cohere": _SHAPE | {"architecture": "CohereForCausalLM", "head_dim": 8, "use_qk_norm": True, "logit_scale": 0.3},
    "falcon, groups of heads": {
        "architecture": "FalconForCausalLM",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "bias": True,
        "num_attention_heads": 8,
        "hidden_size": 64,
        "vocab_size": 321,
    },
    "codegen": {
        "architecture": "CodeGenForCausalLM",
        "hidden_size": 64,
        "num_attention_heads": 8,
        "n_inner": 96,
        "rotary_dim": 4,
        "vocab_size": 321,
    },
    "bloom": {"architecture": "BloomForCausalLM", "num_attention_heads": 8, "hidden_size": 64, "vocab_size": 321},
    "afmoe": _SHAPE
    | {
        "architecture": "AfmoeForCausalLM",
        "num_dense_layers": 2,
        "global_attn_every_n_layers": 2,
        "sliding_window": 13,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
}
