"""Phi 1 and 2, whose attention and MLP run in parallel; and Phi 3, which stores qkv, and gate and up, as one each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.layer_spec import LayerSpec, QKNormSpec, with_parts

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec


def _normed_heads(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    norm = QKNormSpec("layer", bias=True) if fields.flag("qk_layernorm") else None
    return with_parts(layer, mixer={"qk_norm": norm})


def _head_with_bias(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    return replace(spec, head_bias=True)


FAMILIES: dict[str, Family] = {
    "PhiForCausalLM": Family(
        names={"rms_norm_eps": "layer_norm_eps"},
        only={"tie_word_embeddings": (False,)},
        modules=ModuleNames(
            query_norm="self_attn.q_layernorm",
            key_norm="self_attn.k_layernorm",
            norm="model.final_layernorm",
            norms=("input_layernorm",),
            out="self_attn.dense",
            up=("mlp.fc1",),
            down="mlp.fc2",
        ),
        activations=("gelu_new", "gelu_pytorch_tanh", "gelu"),
        partial_rotary=True,
        mixer={"qkv_bias": True, "out_bias": True},
        mlp={"gated": False, "bias": True},
        norms={"kind": "layer", "bias": True, "place": "parallel", "number": 1},
        defaults={"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        read_layer=_normed_heads,
        read_model=_head_with_bias,
    ),
    "Phi3ForCausalLM": Family(
        windows="all",
        partial_rotary=True,
        modules=ModuleNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
    ),
}
