"""The checkpoints of the parity tests: every architecture and every rotary scaling, in unusual legal shapes."""

from __future__ import annotations

from typing import Any

LONG_FACTORS = [1.0 + 0.5 * i for i in range(12)]
"""For 24 dimensions that turn."""

CASES: dict[str, dict[str, Any]] = {
    "llama, 7 heads a group, biases, sharded": {
        "architecture": "LlamaForCausalLM",
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "hidden_size": 63,
        "head_dim": 48,
        "attention_bias": True,
        "mlp_bias": True,
        "shards": "60KB",
    },
    "mistral, window, 4.x": {
        "architecture": "MistralForCausalLM",
        "sliding_window": 45,
        "head_dim": 64,
        "num_key_value_heads": 1,
        "generation": 4,
    },
    "qwen2, tied": {
        "architecture": "Qwen2ForCausalLM",
        "tie_word_embeddings": True,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "hidden_size": 56,
    },
    "qwen2, windows in the last layers": {
        "architecture": "Qwen2ForCausalLM",
        "use_sliding_window": True,
        "sliding_window": 11,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
    },
    "qwen3, wide heads": {"architecture": "Qwen3ForCausalLM", "head_dim": 128, "attention_bias": True},
    "mixtral": {
        "architecture": "MixtralForCausalLM",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 50,
        "shards": "60KB",
    },
    "qwen3 moe": {
        "architecture": "Qwen3MoeForCausalLM",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "num_hidden_layers": 4,
        "mlp_only_layers": [1],
        "head_dim": 48,
    },
    "qwen3 moe, one expert a token": {
        "architecture": "Qwen3MoeForCausalLM",
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "norm_topk_prob": False,
        "head_dim": 16,
        "generation": 4,
    },
    "phi3": {
        "architecture": "Phi3ForCausalLM",
        "hidden_size": 64,
        "num_key_value_heads": 1,
        "sliding_window": 40,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    },
    "gemma2": {
        "architecture": "Gemma2ForCausalLM",
        "head_dim": 256,
        "hidden_size": 32,
        "sliding_window": 13,
        "query_pre_attn_scalar": 100,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "num_hidden_layers": 4,
    },
    "gemma3": {
        "architecture": "Gemma3ForCausalLM",
        "head_dim": 64,
        "sliding_window": 19,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 30,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma3, 4.x": {
        "architecture": "Gemma3ForCausalLM",
        "head_dim": 48,
        "sliding_window": 10,
        "num_hidden_layers": 7,
        "hidden_size": 32,
        "num_key_value_heads": 1,
        "final_logit_softcapping": 8.0,
        "generation": 4,
    },
    "gpt2": {
        "architecture": "GPT2LMHeadModel",
        "n_inner": 100,
        "hidden_size": 64,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "gpt2, untied": {"architecture": "GPT2LMHeadModel", "tie_word_embeddings": False, "num_attention_heads": 1},
    "linear rope": {
        "architecture": "LlamaForCausalLM",
        "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4},
        "generation": 4,
    },
    "yarn rope": {
        "architecture": "Qwen2ForCausalLM",
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
        },
    },
    "yarn rope, mscale": {
        "architecture": "LlamaForCausalLM",
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 8.0,
            "rope_theta": 1e5,
            "original_max_position_embeddings": 32,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "beta_fast": 16.0,
            "truncate": False,
        },
    },
    "llama3 rope": {
        "architecture": "LlamaForCausalLM",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "generation": 4,
    },
}
