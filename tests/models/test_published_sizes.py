"""One published checkpoint of each family: its parameters are those that the hub counts on its card, within 0.5%.

Families that test_published.py has are not repeated. Sizes are those of each checkpoint's config.json; keys that do not
change the count are left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.models.families.registry import FAMILIES
from quire.models.spec import read_spec
from tests.models.test_published import PUBLISHED


def shape(architecture: str, *sizes: int, **rest: Any) -> dict[str, Any]:
    keys = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings",
    )  # fmt: skip
    return {"architectures": [architecture]} | dict(zip(keys, sizes, strict=False)) | rest


LFM2 = ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)]
ROWS: dict[str, tuple[dict[str, Any], float]] = {
    "Qwen3-8B": (
        shape("Qwen3ForCausalLM", 151936, 4096, 12288, 36, 32, 8, head_dim=128, tie_word_embeddings=False), 8.1907e9,
    ),
    "gemma-7b": (shape("GemmaForCausalLM", 256000, 3072, 24576, 28, 16, 16, head_dim=256), 8.5377e9),
    "phi-2": (shape("PhiForCausalLM", 51200, 2560, 10240, 32, 32, 32, partial_rotary_factor=0.4), 2.7797e9),
    "Phi-3.5-MoE-instruct": (
        shape("PhimoeForCausalLM", 32064, 4096, 6400, 32, 32, 8, num_local_experts=16, num_experts_per_tok=2,
              attention_bias=True, lm_head_bias=True, router_jitter_noise=0.01, hidden_act="silu"),
        41.8732e9,
    ),
    "gpt-neox-20b": (
        shape("GPTNeoXForCausalLM", 50432, 6144, 24576, 44, 64, 64, 2048, rotary_pct=0.25, hidden_act="gelu_fast"),
        20.5546e9,
    ),
    "falcon-7b": (
        {"architectures": ["FalconForCausalLM"], "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32,
         "num_attention_heads": 71, "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False,
         "bias": False, "alibi": False},
        6.9217e9,
    ),
    "opt-6.7b": (
        {"architectures": ["OPTForCausalLM"], "vocab_size": 50272, "hidden_size": 4096, "ffn_dim": 16384,
         "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
         "word_embed_proj_dim": 4096, "do_layer_norm_before": True},
        6.6585e9,
    ),
    "gpt-j-6b": (
        {"architectures": ["GPTJForCausalLM"], "vocab_size": 50400, "n_embd": 4096, "n_layer": 28, "n_head": 16,
         "n_positions": 2048, "rotary_dim": 64, "tie_word_embeddings": False},
        6.0509e9,
    ),
    "codegen-350M-mono": (
        {"architectures": ["CodeGenForCausalLM"], "vocab_size": 51200, "n_embd": 1024, "n_layer": 20, "n_head": 16,
         "n_positions": 2048, "rotary_dim": 32, "tie_word_embeddings": False},
        0.3567e9,
    ),
    "gpt-neo-1.3B": (
        {"architectures": ["GPTNeoForCausalLM"], "vocab_size": 50257, "hidden_size": 2048, "num_layers": 24,
         "num_heads": 16, "max_position_embeddings": 2048, "attention_types": [[["global", "local"], 12]],
         "window_size": 256},
        1.3156e9,
    ),
    "starcoder": (
        {"architectures": ["GPTBigCodeForCausalLM"], "vocab_size": 49152, "n_embd": 6144, "n_layer": 40, "n_head": 48,
         "n_inner": 24576, "n_positions": 8192, "multi_query": True},
        15.5175e9,
    ),
    "bloom-7b1": (
        {"architectures": ["BloomForCausalLM"], "vocab_size": 250880, "hidden_size": 4096, "n_layer": 30, "n_head": 32},
        7.0690e9,
    ),
    "mpt-7b": (
        {"architectures": ["MptForCausalLM"], "vocab_size": 50432, "d_model": 4096, "n_layers": 32, "n_heads": 32,
         "expansion_ratio": 4, "max_seq_len": 2048, "no_bias": True, "attn_config": {"alibi": True}},
        6.6493e9,
    ),
    "biogpt": (shape("BioGptForCausalLM", 42384, 1024, 4096, 24, 16, 16, 1024, tie_word_embeddings=True), 0.3468e9),
    "granite-3.1-8b-base": (shape("GraniteForCausalLM", 49152, 4096, 12800, 40, 32, 8, tie_word_embeddings=True),
                            8.1708e9),
    "EXAONE-4.0-1.2B": (
        shape("Exaone4ForCausalLM", 102400, 2048, 4096, 30, 32, 8, head_dim=64, sliding_window=None,
              layer_types=["full_attention"] * 30, tie_word_embeddings=True),
        1.2795e9,
    ),
    "SmolLM3-3B": (shape("SmolLM3ForCausalLM", 128256, 2048, 11008, 36, 16, 4, tie_word_embeddings=True), 3.0751e9),
    "Seed-OSS-36B-Instruct": (
        shape("SeedOssForCausalLM", 155136, 5120, 27648, 64, 80, 8, head_dim=128, attention_bias=True,
              attention_out_bias=False, tie_word_embeddings=False),
        36.1511e9,
    ),
    "stablelm-2-1_6b": (
        shape("StableLmForCausalLM", 100352, 2048, 5632, 24, 32, 32, use_qkv_bias=True, tie_word_embeddings=False),
        1.6445e9,
    ),
    "starcoder2-3b": (
        shape("Starcoder2ForCausalLM", 49152, 3072, 12288, 30, 24, 2, use_bias=True, hidden_act="gelu_pytorch_tanh"),
        3.0304e9,
    ),
    "c4ai-command-r-v01": (shape("CohereForCausalLM", 256000, 8192, 22528, 40, 64, 64), 34.9808e9),
    "c4ai-command-r7b-12-2024": (shape("Cohere2ForCausalLM", 256000, 4096, 14336, 32, 32, 8), 8.0275e9),
    "glm-4-9b-chat-hf": (
        shape("GlmForCausalLM", 151552, 4096, 13696, 40, 32, 2, head_dim=128, attention_bias=True,
              tie_word_embeddings=False),
        9.4000e9,
    ),
    "GLM-4-9B-0414": (
        shape("Glm4ForCausalLM", 151552, 4096, 13696, 40, 32, 2, head_dim=128, attention_bias=True,
              tie_word_embeddings=False),
        9.4003e9,
    ),
    "ERNIE-4.5-0.3B-PT": (
        shape("Ernie4_5ForCausalLM", 103424, 1024, 3072, 18, 16, 2, head_dim=128, use_bias=False,
              tie_word_embeddings=True),
        0.3607e9,
    ),
    "LFM2-8B-A1B": (
        shape("Lfm2MoeForCausalLM", 65536, 2048, 7168, 24, 32, 8, num_experts=32, num_experts_per_tok=4,
              moe_intermediate_size=1792, num_dense_layers=2, layer_types=LFM2, conv_L_cache=3),
        8.3399e9,
    ),
    "mamba-2.8b-hf": (
        {"architectures": ["MambaForCausalLM"], "vocab_size": 50280, "hidden_size": 2560, "num_hidden_layers": 64,
         "state_size": 16, "expand": 2, "conv_kernel": 4},
        2.7683e9,
    ),
    "Mamba-Codestral-7B-v0.1": (
        {"architectures": ["Mamba2ForCausalLM"], "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64,
         "state_size": 128, "expand": 2, "conv_kernel": 4, "num_heads": 128, "head_dim": 64, "n_groups": 8,
         "tie_word_embeddings": False},
        7.2854e9,
    ),
    "OLMo-7B-hf": (shape("OlmoForCausalLM", 50304, 4096, 11008, 32, 32, 32, tie_word_embeddings=False), 6.8881e9),
    "OLMo-2-1124-7B": (shape("Olmo2ForCausalLM", 100352, 4096, 11008, 32, 32, 32, tie_word_embeddings=False), 7.2986e9),
    "Olmo-3-1025-7B": (shape("Olmo3ForCausalLM", 100278, 4096, 11008, 32, 32, 32, tie_word_embeddings=False), 7.2980e9),
    "Apertus-8B-2509": (
        shape("ApertusForCausalLM", 131072, 4096, 21504, 32, 32, 8, hidden_act="xielu", tie_word_embeddings=False),
        8.0533e9,
    ),
    "Minitron-4B-Base": (
        shape("NemotronForCausalLM", 256000, 3072, 9216, 32, 24, 8, head_dim=128, tie_word_embeddings=False), 4.19e9,
    ),
    "persimmon-8b-chat": (
        shape("PersimmonForCausalLM", 262144, 4096, 16384, 36, 64, 64, 16384, qk_layernorm=True), 9.39e9,
    ),
    "AFM-4.5B": (
        shape("ArceeForCausalLM", 128004, 2560, 18432, 36, 20, 4, head_dim=128, tie_word_embeddings=False), 4.62e9,
    ),
    "internlm2-7b": (shape("InternLM2ForCausalLM", 92544, 4096, 14336, 32, 32, 8, bias=False), 7.7377e9),
    "internlm3-8b-instruct": (
        shape("InternLM3ForCausalLM", 128512, 4096, 10240, 48, 32, 2, head_dim=128, qkv_bias=False, bias=False),
        8.8042e9,
    ),
    "EXAONE-3.5-7.8B-Instruct": (
        {"architectures": ["ExaoneForCausalLM"], "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 14336,
         "num_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "activation_function": "silu",
         "max_position_embeddings": 32768},
        7.8184e9,
    ),
    "MiniCPM-2B-sft-bf16": (
        shape("MiniCPMForCausalLM", 122753, 2304, 5760, 40, 36, 36, scale_emb=12, dim_model_base=256, scale_depth=1.4),
        2.7249e9,
    ),
    "Orion-14B-Base": (shape("OrionForCausalLM", 84608, 5120, 15360, 40, 40, 40), 14.5004e9),
    "Aquila-7B": (shape("AquilaForCausalLM", 100008, 4096, 11008, 32, 32, 32), 7.2956e9),
    "dots.llm1.inst": (
        shape("Dots1ForCausalLM", 152064, 4096, 10944, 62, 32, 32, n_routed_experts=128, num_experts_per_tok=6,
              moe_intermediate_size=1408, n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=True,
              scoring_func="noaux_tc", topk_method="noaux_tc"),
        142.77e9,
    ),
    "SOLAR-OPEN-100B": (
        shape("SolarOpenForCausalLM", 196608, 4096, 10240, 48, 64, 8, head_dim=128, n_routed_experts=128,
              num_experts_per_tok=8, moe_intermediate_size=1280, n_shared_experts=1, norm_topk_prob=True),
        102.6e9,
    ),
    "Trinity-Nano-Preview": (
        shape("AfmoeForCausalLM", 200192, 1024, 3072, 56, 8, 2, head_dim=128, num_experts=128, num_experts_per_tok=8,
              num_shared_experts=1, num_dense_layers=2, moe_intermediate_size=256, sliding_window=2048),
        6.12e9,
    ),
    "MiMo-V2-Flash": (shape("MiMoV2FlashForCausalLM", 152576, 4096, 16384, 48, 64, 4), 309e9),
    "GLM-4.7-Flash": (shape("Glm4MoeLiteForCausalLM", 154880, 2048, 10240, 47, 20, 20), 30e9),
    "FlexOlmo-7x7B-1T": (
        shape("FlexOlmoForCausalLM", 100352, 4096, 11008, 32, 32, 32, num_experts=7, num_experts_per_tok=2,
              tie_word_embeddings=False),
        33.27e9,
    ),
    "Hunyuan-7B-Instruct": (
        shape("HunYuanDenseV1ForCausalLM", 128256, 4096, 14336, 32, 32, 8, head_dim=128, use_qk_norm=True,
              tie_word_embeddings=True),
        7.505e9,
    ),
    "helium-1-preview-2b": (shape("HeliumForCausalLM", 48000, 2560, 7040, 24, 20, 20, head_dim=128), 2.17e9),
    "Bamba-9B": (
        shape("BambaForCausalLM", 128256, 4096, 14336, 32, 32, 8, attn_layer_indices=[9, 18, 27], mamba_d_state=128,
              mamba_n_heads=128, mamba_d_head=64, mamba_n_groups=1, mamba_expand=2, mamba_d_conv=4),
        9.78e9,
    ),
    "nanochat-d32": (shape("NanoChatForCausalLM", 65536, 2048, 8192, 32, 16, 16), 1.88e9),
    "Falcon-H1-0.5B-Base": (
        shape("FalconH1ForCausalLM", 32784, 1024, 2048, 36, 8, 2, head_dim=64, mamba_d_ssm=1536, mamba_n_heads=24,
              mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4, tie_word_embeddings=False),
        0.5214e9,
    ),
    "Llama-4-Scout-17B-16E, text": (
        shape("Llama4ForCausalLM", 202048, 5120, 8192, 48, 40, 8, head_dim=128, num_local_experts=16,
              num_experts_per_tok=1, intermediate_size_mlp=16384, interleave_moe_layer_step=1,
              tie_word_embeddings=False),
        107.77e9,
    ),
    "vaultgemma-1b": (shape("VaultGemmaForCausalLM", 256000, 1152, 6912, 26, 4, 4, head_dim=256), 1.0387e9),
    "Ministral-3-8B-Base-2512, text": (
        shape("Ministral3ForCausalLM", 131072, 4096, 14336, 34, 32, 8, head_dim=128, tie_word_embeddings=False), 8.49e9,
    ),
    "XVERSE-7B": (shape("XverseForCausalLM", 100534, 4096, 11008, 32, 32, 32), 7.30e9),
    "cwm": (shape("CwmForCausalLM", 128256, 6144, 21504, 64, 48, 8, head_dim=128, tie_word_embeddings=False), 32.57e9),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_the_published_count_is_found(name: str, tmp_path: Path) -> None:
    config, parameters = ROWS[name]
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    assert read_spec(tmp_path).num_parameters == pytest.approx(parameters, rel=0.005)


WITHOUT = {
    "Gemma3nForCausalLM", "Gemma4UnifiedForCausalLM", "GraniteMoeSharedForCausalLM", "GraniteSWAForCausalLM",
    "HyperCLOVAXForCausalLM", "ExaoneMoeForCausalLM", "MinistralForCausalLM", "Jais2ForCausalLM",
    "Cohere2MoeForCausalLM", "YoutuForCausalLM", "Mistral4ForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
    "LagunaForCausalLM", "LLaMAForCausalLM", "IQuestCoderForCausalLM",
}  # fmt: skip
"""Families without a row: their cards count other parts as well, or name no checkpoint's numbers."""


def test_every_family_has_a_published_checkpoint() -> None:
    counted = {config["architectures"][0] for config, *_ in (*ROWS.values(), *PUBLISHED.values())}
    assert FAMILIES.keys() - counted == WITHOUT
