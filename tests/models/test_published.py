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
GEMMA4 = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "final_logit_softcapping": 30.0}
GEMMA4_LARGE = {"attention_k_eq_v": True, "sliding_window": 1024, "global_head_dim": 512}
DEEPSEEK_YARN = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096,
}  # fmt: skip
STEP_KINDS = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"] * 12
"""With three layers that predict further tokens."""
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
    "Gemma-3-4B, text": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "vocab_size": 262208, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}},
        3_880_263_168, 131072, [1024] * 6 + [None],
    ),
    "EXAONE-4.0-32B": (
        shape("Exaone4ForCausalLM", 102400, 5120, 27392, 64, 40, 8, 131072, head_dim=128, sliding_window=4096,
              sliding_window_pattern="LLLG", rope_theta=1e6, tie_word_embeddings=False,
              rope_scaling={"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                            "original_max_position_embeddings": 8192}),
        32_003_216_384, 131072, [4096] * 3 + [None],
    ),
    "Gemma-4-E4B": (
        shape("Gemma4ForCausalLM", 262144, 2560, 10240, 42, 8, 2, 131072, num_kv_shared_layers=18, **GEMMA4),
        7_463_013_418, 131072, [512] * 5 + [None] * 2,
    ),
    "Gemma-4-31B": (
        shape("Gemma4ForCausalLM", 262144, 5376, 21504, 60, 32, 16, 262144, num_global_key_value_heads=4,
              hidden_size_per_layer_input=0, **GEMMA4 | GEMMA4_LARGE),
        30_697_345_340, 262144, [1024] * 10 + [None],
    ),
    "Gemma-4-26B-A4B": (
        shape("Gemma4ForCausalLM", 262144, 2816, 2112, 30, 16, 8, 262144, num_global_key_value_heads=2,
              hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=128, top_k_experts=8,
              moe_intermediate_size=704, **GEMMA4 | GEMMA4_LARGE),
        25_233_141_790, 262144, [1024] * 9 + [None],
    ),
    "Nemotron-3-Nano-30B-A3B": (
        shape("NemotronHForCausalLM", 131072, 2688, 1856, 52, 32, 2, 262144, head_dim=128, mamba_num_heads=64,
              mamba_head_dim=64, ssm_state_size=128, n_groups=8, conv_kernel=4, n_routed_experts=128,
              num_experts_per_tok=6, moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
              n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True, mlp_hidden_act="relu2",
              hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
        31_577_940_288, 262144, [None],
    ),
    "Jamba-Mini": (
        shape("JambaForCausalLM", 65536, 4096, 14336, 32, 32, 8, 262144, num_experts=16, num_experts_per_tok=2,
              attn_layer_period=8, attn_layer_offset=4, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=16,
              mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=256),
        51_570_323_328, 262144, [None],
    ),
    "FalconMamba-7B": (
        {"architectures": ["FalconMambaForCausalLM"], "vocab_size": 65024, "hidden_size": 4096, "state_size": 16,
         "intermediate_size": 8192, "num_hidden_layers": 64, "time_step_rank": 256, "tie_word_embeddings": False},
        7_272_665_088, 1048576, [],
    ),
    "Kimi-Linear-48B-A3B": (
        shape("KimiLinearForCausalLM", 163840, 2304, 9216, 27, 32, 32, 1048576, model_max_length=1048576, head_dim=72,
              q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
              num_experts=256, num_experts_per_token=8, num_shared_experts=1, moe_intermediate_size=1024,
              first_k_dense_replace=1, mla_use_nope=True, moe_router_activation_func="sigmoid",
              linear_attn_config={"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
                                  "full_attn_layers": [4, 8, 12, 16, 20, 24, 27]}),
        49_122_681_728, 1048576, [None],
    ),
    "DeepSeek-V3.2": (
        shape("DeepseekV32ForCausalLM", 129280, 7168, 18432, 61, 128, 128, 163840, index_topk=2048, ep_size=1,
              rope_scaling=DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, topk_method="noaux_tc"),
        671_026_419_200, 2048, [None],
    ),
    "GLM-5": (
        shape("GlmMoeDsaForCausalLM", 154880, 6144, 12288, 78, 64, 64, 202752, index_topk=2048),
        743_180_209_920, 2048, [None],
    ),
    "Olmo-Hybrid-7B": (
        shape("OlmoHybridForCausalLM", 100352, 3840, 11008, 32, 30, 30, 65536, linear_num_key_heads=30,
              linear_num_value_heads=30, linear_key_head_dim=96, linear_value_head_dim=192, linear_conv_kernel_dim=4,
              rope_parameters={"rope_theta": None, "rope_type": "default"}),
        7_430_870_688, 65536, [None],
    ),
    "Ling-3.0-Flash": (
        shape("BailingHybridForCausalLM", 157184, 2560, 6144, 42, 32, 32, 262144, num_experts=512, kv_lora_rank=512,
              num_experts_per_tok=8, moe_intermediate_size=768, head_dim=128, qk_rope_head_dim=64, layer_group_size=6,
              first_k_dense_replace=2),
        124_414_211_552, 262144, [None],
    ),
    "Zamba2-2.7B": (
        shape("Zamba2ForCausalLM", 32000, 2560, 10240, 54, 32, 32, 4096, n_mamba_heads=80, mamba_ngroups=1,
              mamba_d_state=64, num_mem_blocks=2, adapter_rank=128, use_mem_rope=False, add_bias_linear=False,
              use_shared_attention_adapter=False),
        2_662_214_560, 4096, [None],
    ),
    "MiniCPM3-4B": (
        shape("MiniCPM3ForCausalLM", 73448, 2560, 6400, 62, 40, 40, 32768, q_lora_rank=768, kv_lora_rank=256,
              qk_nope_head_dim=64, qk_rope_head_dim=32, scale_emb=12, scale_depth=1.4, dim_model_base=256,
              tie_word_embeddings=True),
        4_073_875_968, 32768, [None],
    ),
    "Mellum-2-12B": (
        shape("MellumForCausalLM", 98304, 2304, 7168, 28, 32, 4, 131072, head_dim=128, num_experts=64,
              moe_intermediate_size=896, sliding_window=1024),
        12_149_923_072, 131072, [None],
    ),
    "Qwen3-Next-80B-A3B": (
        shape("Qwen3NextForCausalLM", 151936, 2048, 5120, 48, 16, 2, 262144, head_dim=256, partial_rotary_factor=0.25,
              rope_theta=1e7, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
              shared_expert_intermediate_size=512, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
              full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16,
              linear_num_value_heads=32, linear_value_head_dim=128),
        79_674_391_296, 262144, [None],
    ),
    "LFM2-1.2B": (
        shape("Lfm2ForCausalLM", 65536, 2048, 12288, 16, 32, 8, 128000, block_ff_dim=12288, conv_L_cache=3,
              block_auto_adjust_ff_dim=True, block_ffn_dim_multiplier=1.0, block_multiple_of=256, conv_bias=False,
              full_attn_idxs=[2, 5, 8, 10, 12, 14], tie_embedding=True, rope_theta=1e6, norm_eps=1e-5),
        1_170_340_608, 128000, [None],
    ),
    "Granite-4.0-H-Micro": (
        shape("GraniteMoeHybridForCausalLM", 100352, 2048, 8192, 40, 32, 8, 131072, num_local_experts=0,
              num_experts_per_tok=0, shared_intermediate_size=8192, mamba_n_heads=64, mamba_d_head=64,
              mamba_d_state=128, mamba_n_groups=1, mamba_expand=2, mamba_d_conv=4, mamba_conv_bias=True,
              mamba_proj_bias=False, position_embedding_type="nope", tie_word_embeddings=True,
              attention_multiplier=0.015625, embedding_multiplier=12, logits_scaling=8, residual_multiplier=0.22,
              layer_types=["attention" if n in (5, 15, 25, 35) else "mamba" for n in range(40)]),
        3_191_396_096, 131072, [None],
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
    "DeepSeek-V2-Lite": (
        shape("DeepseekV2ForCausalLM", 102400, 2048, 10944, 27, 16, 16, 163840, q_lora_rank=None, kv_lora_rank=512,
              qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64, n_shared_experts=2,
              num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1, moe_layer_freq=1, n_group=1,
              topk_group=1, topk_method="greedy", scoring_func="softmax", norm_topk_prob=False,
              rope_scaling=DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}),
        15_706_484_224, 163840, [None],
    ),
    "DeepSeek-V3": (
        shape("DeepseekV3ForCausalLM", 129280, 7168, 18432, 61, 128, 128, 163840, q_lora_rank=1536, kv_lora_rank=512,
              qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256, n_shared_experts=1,
              num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3, moe_layer_freq=1, n_group=8,
              topk_group=4, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, ep_size=1,
              num_nextn_predict_layers=1, rope_scaling=DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
        671_026_419_200, 163840, [None],
    ),
    "MiniMax-Text-01": (
        shape("MiniMaxForCausalLM", 200064, 6144, 9216, 80, 64, 8, 10240000, head_dim=128, num_local_experts=32,
              num_experts_per_tok=2, rope_theta=1e7, full_attn_alpha_factor=3.5565588200778455,
              linear_attn_alpha_factor=3.5565588200778455, mlp_alpha_factor=3.5565588200778455,
              layer_types=[*["linear_attention"] * 7, "full_attention"] * 10),
        456_089_655_296, 10240000, [None],
    ),
    "MiniMax-M2": (
        shape("MiniMaxM2ForCausalLM", 200064, 3072, 1536, 62, 48, 8, 196608, head_dim=128, num_local_experts=256,
              num_experts_per_tok=8, rotary_dim=64, scoring_func="sigmoid", use_qk_norm=True, use_routing_bias=True,
              shared_intermediate_size=0),
        228_689_764_864, 196608, [None],
    ),
    "Step-3.5-Flash": (
        {key: value for key, value in shape(
            "Step3p5ForCausalLM", 128896, 4096, 11264, 45, 64, 8, 262144, head_dim=128, num_attention_groups=8,
            layer_types=STEP_KINDS, sliding_window=512, attention_other_setting={"num_attention_heads": 96},
            rope_theta=[5e6 if kind == "full_attention" else 1e4 for kind in STEP_KINDS],
            partial_rotary_factors=[0.5 if kind == "full_attention" else 1.0 for kind in STEP_KINDS],
            rope_scaling={"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131072,
                          "low_freq_factor": 1.0, "high_freq_factor": 32.0},
            moe_layers_enum=",".join(map(str, range(3, 45))), moe_num_experts=288, moe_top_k=8,
            moe_intermediate_size=1280, share_expert_dim=1280, moe_router_activation="sigmoid",
            moe_router_scaling_factor=3.0, norm_expert_weight=True, use_moe_router_bias=True,
            use_head_wise_attn_gate=True, swiglu_limits=[0.0] * 43 + [7.0, 7.0, 0.0, 0.0, 0.0],
            swiglu_limits_shared=[0.0] * 44 + [16.0, 0.0, 0.0, 0.0], num_nextn_predict_layers=3,
        ).items() if key != "num_key_value_heads"},
        196_956_130_368, 262144, [None, 512, 512, 512],
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
    assert [group.reach.length for group in spec.kv_groups()] == groups


MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


@pytest.mark.parametrize(("name", "size"), [("gpt-oss-20b", 13_761_264_768), ("gpt-oss-120b", 65_248_815_744)])
def test_quantized_bytes_without_files(name: str, size: int, tmp_path: Path) -> None:
    """Only experts count as quantized, so that the bytes are those that the published index of tensors names."""
    config = PUBLISHED[name][0] | {"quantization_config": MXFP4, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(tmp_path).weight_bytes("bfloat16") == pytest.approx(size, rel=0.005)


def test_lists_of_modules_have_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    """Nemotron 3's say "backbone", where the model says "model": layer 5, of attention, stays dense in NVFP4."""
    modelopt = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["backbone.layers.5.mixer*"]}
    config = PUBLISHED["Nemotron-3-Nano-30B-A3B"][0] | {"quantization_config": modelopt, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path)
    assert spec.quantization is not None
    formats = [spec.quantization.format_of(f"{spec.layer_name(number)}.mixer.q_proj") for number in (5, 12)]
    assert formats[0] is None
    assert formats[1] is not None
