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
_LATENTS = _LIKE_DEEPSEEK | {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_INDEXER = {
    "index_topk": 160,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
"""Of all 150 tokens that are compared, the indexer selects all."""
_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}

_FEW_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.15,
    "logits_scaling": 2.0,
}
_DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention"] * 3 + ["full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
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
    "MellumForCausalLM": _WINDOW
    | _MIXTURE
    | {
        "num_experts": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "SolarOpenForCausalLM": {key: value for key, value in _LIKE_DEEPSEEK.items() if key != "first_k_dense_replace"}
    | {"attention_bias": True},
    "IQuestCoderForCausalLM": {"like": "LlamaForCausalLM", "head_dim": 32},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "conv", "full_attention"], "conv_L_cache": 3, "conv_bias": True},
    "Lfm2MoeForCausalLM": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "Mamba2ForCausalLM": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "num_attention_heads": None,
        "num_key_value_heads": None,
        "intermediate_size": None,
    },
    "MambaForCausalLM": {"state_size": 12, "use_bias": True},
    "FalconMambaForCausalLM": {"state_size": 16, "mixer_rms_eps": 0.05, "time_step_rank": 6},
    "JambaForCausalLM": {
        "num_hidden_layers": 4,
        "attn_layer_period": 5,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "mamba_d_state": 12,
        "rms_norm_eps": 0.05,
    },
    "GraniteMoeHybridForCausalLM": _GRANITE
    | _FEW_EXPERTS
    | _MAMBA
    | {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 40, "mamba_n_groups": 1},
    "FalconH1ForCausalLM": _MAMBA
    | {
        "mamba_d_ssm": 128,
        "mamba_rms_norm": True,
        "ssm_multipliers": [0.7, 0.8, 1.2, 0.9, 1.1],
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.6,
        "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 0.7,
        "key_multiplier": 1.4,
        "mlp_multipliers": [0.9, 0.5],
        "embedding_multiplier": 2.5,
        "lm_head_multiplier": 0.4,
    },
    "Zamba2ForCausalLM": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "adapter_rank": 6,
        "use_mem_rope": True,
        "n_mamba_heads": 8,
        "mamba_d_state": 16,
        "mamba_ngroups": 2,
        "chunk_size": 8,
        "std": 0.1,  # wider weights make transformers' own fp32 differ from fp64 by more than 1e-4
    },
    "BambaForCausalLM": _MAMBA | {"attn_layer_indices": [1]},
    "NemotronHForCausalLM": {
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "moe"],
        "num_hidden_layers": 5,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "routed_scaling_factor": 2.5,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "head_dim": 16,
    },
    "Qwen3NextForCausalLM": _DELTA | _MIXTURE | {"num_experts": 8, "shared_expert_intermediate_size": 20},
    "Qwen3_5ForCausalLM": _DELTA,
    "OlmoHybridForCausalLM": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 20,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "BailingHybridForCausalLM": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_expert_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 24,
        "kda_lower_bound": -2.0,
        "num_nextn_predict_layers": 0,
    },
    "KimiLinearForCausalLM": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "moe_intermediate_size": 24,
    },
    "Qwen3_5MoeForCausalLM": _DELTA | _MIXTURE | {"num_experts": 8, "shared_expert_intermediate_size": 20},
    "MiniMaxForCausalLM": _FEW_EXPERTS
    | {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "block_size": 16,
        "linear_attn_alpha_factor": 1.3,
        "full_attn_alpha_factor": 0.8,
        "mlp_alpha_factor": 1.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
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
    "DeepseekV2ForCausalLM": _LATENTS
    | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "norm_topk_prob": False, "rope_parameters": _YARN},
    "DeepseekV3ForCausalLM": _LATENTS | {"rope_parameters": _YARN, "attention_bias": True},
    "DeepseekV32ForCausalLM": _LATENTS | _INDEXER | {"rope_parameters": _YARN},
    "GlmMoeDsaForCausalLM": _LATENTS | _INDEXER | {"rms_norm_eps": 0.05, "indexer_types": ["full", "shared", "full"]},
    "MiniCPM3ForCausalLM": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "scale_emb": 3.0,
        "dim_model_base": 24,
        "rms_norm_eps": 0.05,
        "pad_token_id": None,
    },
    "YoutuForCausalLM": {"pad_token_id": None}
    | {
        key: _LATENTS[key]
        for key in (
            "num_key_value_heads",
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        )
    },
    "Glm4MoeLiteForCausalLM": _LATENTS | {"rms_norm_eps": 0.05, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "Mistral4ForCausalLM": _LATENTS
    | {"head_dim": 24, "rope_interleave": False, "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.5}},
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
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 6,
        "head_dim": 16,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 300,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "activation_sparsity_pattern": [0.8, 0.0, 0.6, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
        "altup_num_inputs": 3,
        "final_logit_softcapping": 8.0,
    },
    "Gemma4ForCausalLM": {
        "num_hidden_layers": 6,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 321,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "final_logit_softcapping": 8.0,
    },
    "Gemma4UnifiedForCausalLM": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "num_key_value_heads": 4,
        "attention_k_eq_v": True,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "MiMoV2FlashForCausalLM": _WINDOW
    | _MIXTURE
    | {
        "head_dim": 24,
        "v_head_dim": 16,
        "num_key_value_heads": 2,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "routed_scaling_factor": 2.5,
    },
    "Step3p5ForCausalLM": _WINDOW
    | {
        "like": "Step3p7ForConditionalGeneration",
        "head_dim": 16,
        "num_sliding_attention_heads": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "share_expert_dim": 40,
        "moe_router_scaling_factor": 1.7,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "swiglu_limits": [0.0, 0.0, 0.3, 0.5],
        "swiglu_limits_shared": [0.2, 0.0, 0.0, 0.4],
        "rope_parameters": {
            "full_attention": LLAMA3_ROPE | {"partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "LagunaForCausalLM": _WINDOW
    | _MIXTURE
    | {
        "num_attention_heads_per_layer": [4, 8, 4, 8],
        "num_experts": 8,
        "shared_expert_intermediate_size": 24,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "moe_router_logit_softcapping": 3.0,
        "moe_routed_scaling_factor": 1.7,
    },
}
"""By `architectures` entry, what differs from SHAPE; `like` names the class that transformers has of it."""
