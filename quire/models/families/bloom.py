"""Bloom and MPT: scores fall with the distance of a key (ALiBi), and positions show nowhere else."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.layer_spec import LayerSpec, with_parts

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec


def slopes(heads: int) -> tuple[float, ...]:
    """Return the slope of each head (Press et al. 2021, section 3): powers of 2^(-8 / n) for the largest power of two n
    of heads; the others have every second one of the powers for 2 n heads."""
    whole = 2 ** math.floor(math.log2(heads))
    others = [2.0 ** (-4 / whole * power) for power in range(1, 2 * (heads - whole), 2)]
    return tuple([2.0 ** (-8 / whole * power) for power in range(1, whole + 1)] + others)


def _bloom(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    return with_parts(layer, mixer={"slopes": slopes(layer.mixer.heads)})


def _normed_embedding(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    return replace(spec, embedding_norm=True)


_MPT_ATTENTION: dict[str, tuple[object, ...]] = {
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "attn_type": ("multihead_attention",),
    "prefix_lm": (False,),
    "qk_ln": (False,),
}
"""The values that are served of `attn_config`'s keys."""


def _mpt(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    values: Any = fields.get("attn_config", {})
    if not isinstance(values, dict):
        raise fields.wrong("attn_config", "must be an object")
    for key, served in _MPT_ATTENTION.items():
        if values.get(key, served[0]) not in served:
            raise fields.wrong("attn_config", f"has {key} {values[key]!r}, which is not supported")
    clip, scale = (
        None if not values.get(key) else fields.positive("attn_config", values[key], key)
        for key in ("clip_qkv", "softmax_scale")
    )
    own = layer.mixer
    mixer = {"clip": clip, "scale": scale or own.scale, "slopes": _mpt_slopes(own.heads)}
    return with_parts(layer, mixer=mixer, mlp={"width": fields.count("expansion_ratio", 4) * own.outputs})


def _mpt_slopes(heads: int) -> tuple[float, ...]:
    """Return the slope of each head: those of the next power of two, every second one first."""
    whole = 2 ** math.ceil(math.log2(heads))
    powers = [2.0 ** (-8 / whole * power) for power in range(1, whole + 1)]
    return tuple(powers if whole == heads else (powers[1::2] + powers[::2])[:heads])


FAMILIES: dict[str, Family] = {
    "BloomForCausalLM": Family(
        modules=ModuleNames(
            embedding="transformer.word_embeddings",
            embedding_norm="transformer.word_embeddings_layernorm",
            norm="transformer.ln_f",
            layer="transformer.h.{}",
            qkv=("self_attention.query_key_value",),
            qkv_layout="groups",
            out="self_attention.dense",
            up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
            older=(
                ("h.", "transformer.h."),
                ("word_embeddings", "transformer.word_embeddings"),
                ("ln_f.", "transformer.ln_f."),
            ),
        ),
        names={
            "hidden_size": ("hidden_size", "n_embed"),
            "num_hidden_layers": ("n_layer", "num_hidden_layers"),
            "num_attention_heads": ("n_head", "num_attention_heads"),
            "num_key_value_heads": ("n_head", "num_attention_heads"),
            "max_position_embeddings": "seq_length",
            "rms_norm_eps": "layer_norm_epsilon",
            "intermediate_size": "n_inner",
        },
        only={"apply_residual_connection_post_layernorm": (False,)},
        defaults={"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        activations=("gelu_new",),
        mixer={"rope": None, "qkv_bias": True, "out_bias": True},
        mlp={"gated": False, "bias": True},
        norms={"kind": "layer", "bias": True},
        read_layer=_bloom,
        read_model=_normed_embedding,
    ),
    "MptForCausalLM": Family(
        modules=ModuleNames(
            embedding="transformer.wte",
            norm="transformer.norm_f",
            layer="transformer.blocks.{}",
            norms=("norm_1", "norm_2"),
            qkv=("attn.Wqkv",),
            out="attn.out_proj",
            up=("ffn.up_proj",),
            down="ffn.down_proj",
        ),
        names={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "num_key_value_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        only={"no_bias": (True,), "logit_scale": (), "embedding_fraction": (1.0,)},
        defaults={
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        activations=("gelu",),
        mixer={"rope": None, "qkv_bias": False, "out_bias": False},
        mlp={"gated": False, "bias": False},
        norms={"kind": "layer"},
        read_layer=_mpt,
    ),
}
