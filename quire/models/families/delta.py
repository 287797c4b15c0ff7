"""Gated delta nets in three layers of four: Qwen3-Next and Qwen 3.5 with gated attention, Kimi Linear with latents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config_file import ConfigFile
from quire.models.families.deepseek import latents
from quire.models.families.family import Family, ModuleNames
from quire.models.families.hybrids import layer_kinds
from quire.models.families.layers import in_turn
from quire.models.families.mixtures import SIGMOID, experts_in_place_of_mlps
from quire.models.layer_spec import GateSpec, LayerSpec, QKNormSpec, with_parts
from quire.models.recurrent_spec import GatedDeltaSpec, KimiDeltaSpec

_KINDS = ("linear_attention", "full_attention")


def _mixer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    layers, interval = fields.count("num_hidden_layers"), fields.count("full_attention_interval", 4)
    usual = [_KINDS[(layer + 1) % interval == 0] for layer in range(layers)]
    if layer_kinds(fields, _KINDS, usual)[number] == "full_attention":
        return layer
    mixer = GatedDeltaSpec(
        layer.mixer.outputs,
        layer.mixer.outputs,
        keys=fields.count("linear_num_key_heads"),
        values=fields.count("linear_num_value_heads"),
        key_dim=fields.count("linear_key_head_dim"),
        value_dim=fields.count("linear_value_head_dim"),
        kernel=fields.count("linear_conv_kernel_dim"),
        eps=layer.norms.eps,
    )
    if mixer.values % mixer.keys:
        raise fields.wrong("linear_num_value_heads", f"must be a multiple of linear_num_key_heads ({mixer.keys})")
    return replace(layer, mixer=mixer)


def _kimi_kinds(fields: ConfigFile) -> list[str]:
    """Return the kinds of layers that the published file names by numbers that begin with 1, or usual ones."""
    layers, own = fields.count("num_hidden_layers"), fields.get("linear_attn_config") or {}
    full = own.get("full_attn_layers") if isinstance(own, dict) else None
    if not isinstance(full, list):
        full = range(5, layers + 1, 4)
    return [_KINDS[number + 1 in full] for number in range(layers)]


def _bailing(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    layers, group = fields.count("num_hidden_layers"), fields.count("layer_group_size")
    usual = [_KINDS[(number + 1) % group == 0] for number in range(layers)]
    if layer_kinds(fields, _KINDS, usual)[number] == "full_attention":
        return with_parts(latents(fields, layer, number), mixer={"gate": GateSpec("sigmoid", by_head=True)})
    bound = fields.get("kda_lower_bound") if fields.flag("kda_safe_gate", True) else None
    if bound is not None and (not isinstance(bound, int | float) or isinstance(bound, bool) or bound >= 0):
        raise fields.wrong("kda_lower_bound", "must be a number below 0")
    h, heads, width = layer.mixer.outputs, layer.mixer.heads, fields.count("linear_head_dim")
    kernel, eps = fields.count("short_conv_kernel_size"), layer.norms.eps
    mixer = KimiDeltaSpec(h, h, heads, heads, width, width, kernel, eps, bound=bound, by_latents=False)
    return replace(layer, mixer=mixer)


def _olmo(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    layers, rope = fields.count("num_hidden_layers"), fields.get("rope_parameters")
    if layer_kinds(fields, _KINDS, [_KINDS[n % 4 == 3] for n in range(layers)])[number] == "full_attention":
        is_rotated = not isinstance(rope, dict) or rope.get("rope_theta", rope) is not None
        return with_parts(layer, norms={"place": "behind"}, mixer={} if is_rotated else {"rope": None})
    own = layer.mixer
    keys, values = (fields.count(f"linear_num_{kind}_heads", own.heads) for kind in ("key", "value"))
    width = fields.count("linear_key_head_dim", int(0.75 * own.outputs / keys))
    mixer = GatedDeltaSpec(
        own.outputs,
        own.outputs,
        keys=keys,
        values=values,
        key_dim=width,
        value_dim=fields.count("linear_value_head_dim", 2 * width),
        kernel=fields.count("linear_conv_kernel_dim"),
        eps=1e-5,
        factor=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0,
    )
    if values % keys:
        raise fields.wrong("linear_num_value_heads", f"must be a multiple of linear_num_key_heads ({keys})")
    return replace(layer, mixer=mixer)


def _kimi(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    if layer_kinds(fields, _KINDS, _kimi_kinds(fields))[number] == "full_attention":
        return with_parts(latents(fields, layer, number), mixer={"rope": None})
    own, keys = fields.get("linear_attn_config"), ("num_heads", "head_dim", "short_conv_kernel_size")
    sizes = tuple(own.get(key) for key in keys) if isinstance(own, dict) else (None,) * 3
    usual = "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"
    heads, width, kernel = (
        fields.count(key) if size is None else int(fields.positive("linear_attn_config", size, inner))
        for key, size, inner in zip(usual, sizes, keys, strict=True)
    )
    h = layer.mixer.outputs
    return replace(layer, mixer=KimiDeltaSpec(h, h, heads, heads, width, width, kernel, layer.norms.eps))


CONVOLUTIONS = "conv1d.weight", ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
"""The convolution of queries, keys and values, and its parts in some checkpoints."""
_MODULES = ModuleNames(
    gate="",
    recurrent="linear_attn",
    shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
)
_SEPARATE = replace(_MODULES, delta_in=("in_proj_qkv", "in_proj_z"), delta_gates=("in_proj_b", "in_proj_a"))
_LINEAR: dict[str, Any] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 32768,
}
_EXPERTS = {
    "num_key_value_heads": 2,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_FAMILY: dict[str, Any] = {
    "windows": "chunks",
    "partial_rotary": True,
    "mixer": {"qk_norm": QKNormSpec(), "gate": GateSpec("sigmoid")},
    "norms": {"unit_offset": True},
}
_KIMI_NAMES: dict[str, str | tuple[str, ...]] = {
    "head_dim": "qk_rope_head_dim",
    "max_position_embeddings": ("model_max_length", "max_position_embeddings"),
    "num_local_experts": ("num_experts", "num_local_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "num_experts_per_tok"),
    "num_shared_experts": ("num_shared_experts", "n_shared_experts"),
    "norm_topk_prob": ("moe_renormalize", "norm_topk_prob"),
    "n_group": ("num_expert_group", "n_group"),
}
FAMILIES: dict[str, Family] = {
    "Qwen3NextForCausalLM": Family(
        **_FAMILY,
        modules=_MODULES,
        activations=("silu",),
        defaults=_LINEAR | _EXPERTS | {"norm_topk_prob": True},
        read_layer=in_turn(_mixer, experts_in_place_of_mlps(gated=True)),
    ),
    "Qwen3_5ForCausalLM": Family(
        **_FAMILY,
        modules=_SEPARATE,
        activations=("silu",),
        defaults=_LINEAR | {"num_key_value_heads": 4},
        read_layer=_mixer,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        **_FAMILY,
        modules=_SEPARATE,
        activations=("silu",),
        defaults=_LINEAR | _EXPERTS | {"num_experts_per_tok": 8, "num_experts": 256, "intermediate_size": 512},
        read_layer=in_turn(_mixer, experts_in_place_of_mlps(gated=True, renormalise=True)),
    ),
    "OlmoHybridForCausalLM": Family(
        windows="chunks",
        mixer={"qk_norm": QKNormSpec(whole=True, weights="by head")},
        modules=ModuleNames(
            norms=(
                "input_layernorm",
                "post_attention_layernorm",
                "post_attention_layernorm",
                "post_feedforward_layernorm",
            ),
            recurrent="linear_attn",
            delta_in=("q_proj", "k_proj", "v_proj", "g_proj"),
            delta_gates=("b_proj", "a_proj"),
            delta_norm="o_norm",
            delta_out="o_proj",
            others=(
                (".attention_layer_norm.", ".input_layernorm."),
                (".feedforward_layer_norm.", ".post_attention_layernorm."),
            ),
            joined=(CONVOLUTIONS,),
        ),
        defaults={"linear_conv_kernel_dim": 4, "max_position_embeddings": 65536},
        activations=("silu",),
        read_layer=_olmo,
    ),
    "BailingHybridForCausalLM": Family(
        windows="chunks",
        modules=ModuleNames(
            recurrent="self_attn",
            gate="self_attn.g_proj",
            delta_norm="o_norm",
            delta_out="o_proj",
            others=(
                ("model.word_embeddings.", "model.embed_tokens."),
                (".attention.", ".self_attn."),
                (".self_attn.dense.", ".self_attn.o_proj."),
                (".forget_gate.", "."),
                (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
            ),
            joined=(CONVOLUTIONS,),
        ),
        names=_KIMI_NAMES | {"linear_head_dim": ("linear_head_dim", "head_dim")},
        defaults={
            "linear_head_dim": 128,
            "head_dim": 64,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "short_conv_kernel_size": 4,
            "layer_group_size": 6,
            "kda_lower_bound": -5.0,
            "num_local_experts": 512,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 768,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 2,
            "num_nextn_predict_layers": 1,
            "rope_theta": 6e6,
            "max_position_embeddings": 262144,
        },
        only={"q_lora_rank": ()},
        activations=("silu",),
        read_layer=in_turn(_bailing, experts_in_place_of_mlps(**SIGMOID)),
    ),
    "KimiLinearForCausalLM": Family(
        windows="chunks",
        modules=ModuleNames(
            recurrent="self_attn",
            delta_norm="o_norm",
            delta_out="o_proj",
            expert=("w1", "w3", "w2"),
            others=((".block_sparse_moe.", ".mlp."), (".forget_gate.", ".")),
            joined=(CONVOLUTIONS,),
        ),
        names=_KIMI_NAMES,
        defaults={
            "head_dim": 64,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "linear_num_heads": 32,
            "linear_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.446,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1048576,
        },
        only={"mla_use_nope": (True,), "moe_router_activation_func": ("sigmoid",), "moe_layer_freq": (1,)},
        activations=("silu",),
        read_layer=in_turn(_kimi, experts_in_place_of_mlps(**SIGMOID)),
    ),
}
