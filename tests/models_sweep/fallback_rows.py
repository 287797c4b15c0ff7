"""A tiny configuration of every model type that transformers has a causal language model of.

Most follow from the names of a config's keys: SIZES has a small value for each name that sizes go by. ROWS has what a
model type needs besides, to be built at all, or to have every kind of layer in its few layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

_NAMES = {
    64: "hidden_size d_model n_embd embedding_size lru_width attention_hidden_size word_embed_proj_dim",
    96: "intermediate_size n_inner ffn_dim d_ff dff ffn_hidden_size hidden_dim decoder_ffn_dim encoder_ffn_dim",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_attention_heads n_head n_heads num_heads "
    "attention_heads decoder_attention_heads index_n_heads encoder_attention_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts linear_num_value_heads",
    512: "max_position_embeddings n_positions n_ctx context_length max_seq_len",
    48: "moe_intermediate_size moe_ffn_hidden_size expert_ffn_hidden_size shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size",
    320: "vocab_size vocab_size_per_layer_input audio_vocab_size",
    16: "head_dim global_head_dim qk_nope_head_dim mamba_d_head mamba_head_dim mamba_d_state ssm_state_size state_size "
    "index_head_dim linear_key_head_dim linear_value_head_dim sliding_window attention_window_size patch_size",
    8: "qk_rope_head_dim mamba_n_heads mamba_num_heads chunk_size mamba_chunk_size index_topk "
    "hidden_size_per_layer_input",
    2: "num_key_value_heads num_global_key_value_heads num_experts_per_tok moe_k moe_topk top_k_experts n_group "
    "mamba_n_groups n_groups linear_num_key_heads encoder_layers eos_token_id depth",
    1: "topk_group first_k_dense_replace pad_token_id",
    0: "bos_token_id num_kv_shared_layers",
    24: "q_lora_rank",
    32: "kv_lora_rank image_size",
    12: "v_head_dim",
    128: "mamba_d_ssm",
}
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
"""Small values by the names of keys."""
_OPTIONAL = ("q_lora_rank", "sliding_window")
"""Keys whose None has a meaning."""
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
_RECURRENT = ["linear_attention", "full_attention"] * 2

ROWS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "longcat_flash", "glm_moe_dsa", "glm4_moe_lite",
         "mistral4", "dots3_note_text"),
        _LATENT,
    ),
    "minicpm3": {"num_key_value_heads": 4},
    "youtu": _LATENT,
    "hy_v4": {"num_key_value_heads": 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "kimi_linear": {"layer_types": _RECURRENT, "num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "reformer": {
        "attn_layers": ["local", "local"], "axial_pos_shape": [16, 32], "axial_pos_embds_dim": [32, 32], "hash_seed": 0,
    },
    "zaya": {"num_experts_per_tok": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "dots1": _LATENT | {"n_shared_experts": 1, "moe_intermediate_size": 48, "n_routed_experts": 4},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2, "mamba_headdim": 16, "n_mamba_heads": 8, "mamba_ngroups": 2},
    "xlm": {"causal": True, "emb_dim": 64},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
}  # fmt: skip


def tiny_config(
    kind: type[PreTrainedConfig], model_type: str, more: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """Make a config whose sizes are small, with those of its parts; `more` has values that it has besides, and those of
    parts by their names."""
    more = dict(more or {})
    usual = kind()
    known, values = usual.to_dict(), {}
    for name, size in SIZES.items():
        is_known = name in known or name in kind.attribute_map
        given = known.get(kind.attribute_map.get(name, name))
        if is_known and not isinstance(given, (list, dict)) and not (name in _OPTIONAL and given is None):
            values[name] = size
    if "is_decoder" in known:
        values["is_decoder"] = True
    for name in kind.sub_configs:
        part = getattr(usual, name, None)
        if isinstance(part, PreTrainedConfig):
            values[name] = tiny_config(type(part), part.model_type, more.pop(name, None)).to_dict()
    return kind(**values | ROWS.get(model_type, {}) | more)


def config_of(model_type: str, config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Make a config of this type, or of its part that the model's class takes."""
    config = tiny_config(CONFIG_MAPPING[model_type], model_type)
    return config if isinstance(config, config_class) else config.get_text_config(decoder=True)
