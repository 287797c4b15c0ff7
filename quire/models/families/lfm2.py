"""LFM2: gated short convolutions, and attention in some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.hybrids import layer_kinds
from quire.models.families.layers import in_turn
from quire.models.families.mixtures import experts_in_place_of_mlps
from quire.models.layer_spec import LayerSpec, MixtureSpec, MlpSpec, QKNormSpec, with_parts
from quire.models.recurrent_spec import ShortConvSpec

_KINDS = ("conv", "full_attention")


def _mixer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    layers, attention = fields.count("num_hidden_layers"), fields.get("full_attn_idxs")
    usual = None
    if isinstance(attention, list):
        usual = [_KINDS[layer in attention] for layer in range(layers)]
    elif fields.get("layer_types") is None:
        usual = [_KINDS[1]] * layers
    if layer_kinds(fields, _KINDS, usual)[number] == "full_attention":
        return layer
    h = layer.mixer.outputs
    return replace(layer, mixer=ShortConvSpec(h, h, h, fields.count("conv_L_cache"), fields.flag("conv_bias")))


def _width(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with the width of its MLP that the file leads to: two thirds, as a whole number of blocks."""
    assert isinstance(layer.mlp, MlpSpec)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return layer
    width, block = 2 * layer.mlp.width // 3, fields.count("block_multiple_of")
    if fields.get("block_ffn_dim_multiplier") is not None:
        width = int(fields.number("block_ffn_dim_multiplier", 1.0) * width)
        width = block * -(-width // block)
    return with_parts(layer, mlp={"width": width})


def _corrected(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with experts' scores that are corrected for the choice, unless the file says otherwise."""
    if not isinstance(layer.mlp, MixtureSpec) or fields.flag("use_expert_bias"):
        return layer
    return replace(layer, mlp=replace(layer.mlp, routing=replace(layer.mlp.routing, correction=False)))


_FEED_FORWARD = ("feed_forward.w1", "feed_forward.w3")
_LFM2: dict[str, Any] = {
    "windows": "chunks",
    "mixer": {"qk_norm": QKNormSpec()},
    "modules": ModuleNames(
        norm="model.embedding_norm",
        norms=("operator_norm", "ffn_norm"),
        out="self_attn.out_proj",
        query_norm="self_attn.q_layernorm",
        key_norm="self_attn.k_layernorm",
        up=_FEED_FORWARD,
        down="feed_forward.w2",
        recurrent="conv",
        router="feed_forward.gate",
        experts="feed_forward.experts",
        expert=("w1", "w3", "w2"),
        correction="feed_forward.expert_bias",
    ),
    "names": {
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": ("tie_embedding", "tie_word_embeddings"),
        "intermediate_size": ("block_ff_dim", "intermediate_size"),
        "first_k_dense_replace": "num_dense_layers",
    },
}
_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "conv_L_cache": 3,
}
FAMILIES: dict[str, Family] = {
    "Lfm2ForCausalLM": Family(
        **_LFM2,
        defaults=_DEFAULTS | {"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0},
        read_layer=in_turn(_mixer, _width),
    ),
    "Lfm2MoeForCausalLM": Family(
        **_LFM2,
        defaults=_DEFAULTS
        | {
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "first_k_dense_replace": 2,
            "norm_topk_prob": True,
            "use_expert_bias": True,
        },
        read_layer=in_turn(
            _mixer, experts_in_place_of_mlps(scoring="sigmoid", correction=True, epsilon=1e-6), _corrected
        ),
    ),
}
