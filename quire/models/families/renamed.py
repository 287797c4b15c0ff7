"""Relatives of Llama whose code is published with their weights: other names, and a line or two of arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.layer_spec import LayerSpec, with_parts

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec


def _internlm_biases(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    bias = fields.flag("bias")
    mixer = {"qkv_bias": fields.flag("qkv_bias", bias), "out_bias": bias}
    return with_parts(layer, mixer=mixer, mlp={"bias": bias})


def _internlm2(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    bias = fields.flag("bias")
    return with_parts(layer, mixer={"qkv_bias": bias, "out_bias": bias}, mlp={"bias": False})


def _minicpm_layer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer for a stream that is kept divided by the factor of what sublayers add (granite.py)."""
    return with_parts(layer, norms={"eps": layer.norms.eps / _minicpm_factor(fields) ** 2})


def _minicpm_model(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    embedding = fields.number("scale_emb", 1.0) / _minicpm_factor(fields)
    return replace(spec, embedding_scale=embedding, logit_scale=fields.number("dim_model_base", 1.0) / spec.hidden)


def _minicpm_factor(fields: ConfigFile) -> float:
    return float(fields.number("scale_depth", 1.0) / fields.count("num_hidden_layers") ** 0.5)


_LLAMA = Family()
FAMILIES: dict[str, Family] = {
    "LLaMAForCausalLM": _LLAMA,
    "AquilaForCausalLM": _LLAMA,
    "XverseForCausalLM": _LLAMA,
    "IQuestCoderForCausalLM": Family(
        defaults={"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
        only={"clip_qkv": (), "use_sliding_window": (False,)},
    ),
    "InternLM2ForCausalLM": Family(
        modules=ModuleNames(
            embedding="model.tok_embeddings",
            head="output",
            qkv=("attention.wqkv",),
            qkv_layout="groups",
            out="attention.wo",
            norms=("attention_norm", "ffn_norm"),
            up=("feed_forward.w1", "feed_forward.w3"),
            down="feed_forward.w2",
        ),
        read_layer=_internlm2,
    ),
    "InternLM3ForCausalLM": Family(read_layer=_internlm_biases),
    "ExaoneForCausalLM": Family(
        modules=ModuleNames(
            embedding="transformer.wte",
            norm="transformer.ln_f",
            layer="transformer.h.{}",
            norms=("ln_1", "ln_2"),
            qkv=tuple(f"attn.attention.{each}_proj" for each in "qkv"),
            out="attn.attention.out_proj",
            up=("mlp.c_fc_0", "mlp.c_fc_1"),
            down="mlp.c_proj",
        ),
        names={
            "num_hidden_layers": "num_layers",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        mixer={"qkv_bias": False, "out_bias": False},
        mlp={"bias": False},
        defaults={"rms_norm_eps": 1e-5},
    ),
    "MiniCPMForCausalLM": Family(
        only={"num_experts": (0,), "sparse_config": ()},
        defaults={"tie_word_embeddings": True},
        read_layer=_minicpm_layer,
        read_model=_minicpm_model,
    ),
    "OrionForCausalLM": Family(norms={"kind": "layer", "bias": True}, mlp={"bias": False}),
}
