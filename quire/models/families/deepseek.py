"""Attention over latents (MLA): DeepSeek V2 to V3.2, Kimi K2, GLM-4.7-Flash, GLM-5, Mistral 4, MiniCPM 3 and Youtu."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.layers import in_turn
from quire.models.families.ministral import query_scale
from quire.models.families.mixtures import SIGMOID, experts_in_place_of_mlps
from quire.models.layer_spec import AttentionSpec, LatentSpec, LayerSpec, with_parts
from quire.models.rope_spec import yarn_scale

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec

_NAMES = {
    "head_dim": "qk_rope_head_dim",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
}


def latents(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with attention over latents in place of keys and values."""
    own, values = layer.mixer, fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    assert isinstance(own, AttentionSpec) and own.rope is not None
    nope, rank = fields.count("qk_nope_head_dim"), fields.get("q_lora_rank")
    scale = (nope + own.head_dim) ** -0.5
    if own.rope.scaling is not None and values.get("mscale_all_dim"):
        factor, share = (fields.positive("rope_scaling", values.get(key), key) for key in ("factor", "mscale_all_dim"))
        scale *= yarn_scale(factor, share) ** 2
    mixer = LatentSpec(
        inputs=own.inputs,
        outputs=own.outputs,
        heads=own.heads,
        query_rank=None if rank is None else fields.count("q_lora_rank"),
        rank=fields.count("kv_lora_rank"),
        nope=nope,
        rotated=own.head_dim,
        value_dim=fields.count("v_head_dim", max(1, own.outputs // own.heads)),
        scale=scale,
        rope=replace(own.rope, share=1.0, interleaved=fields.flag("rope_interleave", True)),
        bias=own.qkv_bias,
    )
    return replace(layer, mixer=mixer)


def _minicpm(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer for a stream that is kept divided by the factor of what sublayers add (granite.py)."""
    layer = latents(fields, layer, number)
    assert layer.mixer.rope is not None
    eps = layer.norms.eps / _depth_factor(fields) ** 2
    return with_parts(layer, mixer={"rope": replace(layer.mixer.rope, interleaved=False)}, norms={"eps": eps})


def _minicpm_model(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    base = fields.get("dim_model_base")
    embedding = fields.number("scale_emb", 12.0) / _depth_factor(fields)
    logits = 1.0 if base is None else fields.number("dim_model_base", 256.0) / spec.hidden
    return replace(spec, embedding_scale=embedding, logit_scale=logits)


def _depth_factor(fields: ConfigFile) -> float:
    """Return the factor of what sublayers add to the stream."""
    if fields.get("scale_depth") is None:
        return 1.0
    return float(fields.number("scale_depth", 1.4) / fields.count("num_hidden_layers") ** 0.5)


def _greedy(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with experts that are chosen among all, or among those of the best groups."""
    method = fields.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    groups: dict[str, Any] = {"groups": 1, "kept_groups": 1} if method == "greedy" else {}
    return experts_in_place_of_mlps(renormalise=False, fp32="sums", **groups)(fields, layer, number)


def _dense(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    """Return the model with sequences of at most `index_topk` tokens: its indexer selects all of so few, and is not
    needed (DeepSeek-AI 2025, "DeepSeek-V3.2", section 2).
    """
    most = fields.count("index_topk")
    if most >= spec.max_model_len:
        return spec
    return replace(spec, max_model_len=most, length_limit=f"index_topk, beyond which attention is sparse ({most:,})")


_SIZES: dict[str, Any] = {"kv_lora_rank": 512, "head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_V3: dict[str, Any] = {
    **_SIZES,
    "q_lora_rank": 1536,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 4096,
}
_LIKE_V3: dict[str, Any] = {
    "partial_rotary": True,
    "names": _NAMES,
    "only": {"moe_layer_freq": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    "read_layer": in_turn(latents, experts_in_place_of_mlps(**SIGMOID)),
}
_INDEXED: dict[str, Any] = _LIKE_V3 | {
    "windows": "chunks",
    "modules": ModuleNames(unread_in_layers=("self_attn.indexer",)),
    "read_model": _dense,
}

FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": Family(
        partial_rotary=True,
        names=_NAMES,
        defaults={
            **_SIZES,
            "q_lora_rank": 1536,
            "num_local_experts": 64,
            "num_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "max_position_embeddings": 2048,
        },
        only={"moe_layer_freq": (1,), "scoring_func": ("softmax",), "norm_topk_prob": (False,)},
        read_layer=in_turn(latents, _greedy),
    ),
    "MiniCPM3ForCausalLM": Family(
        names=_NAMES,
        defaults={
            "q_lora_rank": 768,
            "kv_lora_rank": 256,
            "head_dim": 32,
            "qk_nope_head_dim": 64,
            "scale_emb": 12.0,
            "scale_depth": 1.4,
            "dim_model_base": 256,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
        },
        read_layer=_minicpm,
        read_model=_minicpm_model,
    ),
    "YoutuForCausalLM": Family(
        partial_rotary=True,
        names=_NAMES,
        defaults={
            **_SIZES,
            "q_lora_rank": 1536,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
        },
        read_layer=latents,
    ),
    "DeepseekV3ForCausalLM": Family(**_LIKE_V3, defaults=_V3),
    "DeepseekV32ForCausalLM": Family(
        **_INDEXED, defaults=_V3 | {"index_topk": 2048, "max_position_embeddings": 163840}
    ),
    "GlmMoeDsaForCausalLM": Family(
        **_INDEXED,
        defaults=_V3
        | {
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_group": 1,
            "topk_group": 1,
            "rms_norm_eps": 1e-5,
            "index_topk": 2048,
            "max_position_embeddings": 202752,
        },
    ),
    "Glm4MoeLiteForCausalLM": Family(
        partial_rotary=True,
        names=_NAMES,
        defaults={
            **_SIZES,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "num_local_experts": 64,
            "num_experts_per_tok": 4,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 202752,
        },
        only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        read_layer=in_turn(latents, experts_in_place_of_mlps(**SIGMOID)),
    ),
    "Mistral4ForCausalLM": Family(
        partial_rotary=True,
        names=_NAMES,
        defaults={
            **_SIZES,
            "q_lora_rank": 1024,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "num_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "norm_topk_prob": True,
            "max_position_embeddings": 1048576,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        read_layer=in_turn(latents, query_scale, experts_in_place_of_mlps(of_best_two=True, epsilon=1e-20)),
    ),
}
