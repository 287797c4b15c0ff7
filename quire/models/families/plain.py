"""Architectures that differ from Llama in a line or two."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.kv_cache_groups import read_window
from quire.models.layer_spec import LayerSpec, QKNormSpec, with_parts

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec

_NO_GATE = ModuleNames(up=("mlp.up_proj",))
_PLAIN = ("relu2", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


def _seed_oss(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    return with_parts(layer, mixer={"out_bias": fields.flag("attention_out_bias")})


def _smollm3(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer without rotation, if it is one of those: by default each fourth."""
    rotated = fields.get("no_rope_layers")
    layers = fields.count("num_hidden_layers")
    if rotated is None:
        rotated = [(each + 1) % fields.count("no_rope_layer_interval") != 0 for each in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers or not all(each in (0, 1) for each in rotated):
        raise fields.wrong("no_rope_layers", f"must be a list of {layers} numbers 0 and 1")
    if rotated[number]:
        return layer
    window = read_window(fields) if fields.get("layer_types") is None else layer.mixer.window
    return with_parts(layer, mixer={"rope": None, "window": window})


def _cwm(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with a window, if `layer_types` is missing and it is not one of each fourth, from the first."""
    if fields.get("layer_types") is not None:
        return layer
    return with_parts(layer, mixer={"window": read_window(fields) if number % 4 else None})


def _stablelm(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    parallel: dict[str, Any] = {"place": "parallel", "number": 1} if fields.flag("use_parallel_residual") else {}
    norm = QKNormSpec("layer", weights="by module") if fields.flag("qk_layernorm") else None
    return with_parts(layer, mixer={"qkv_bias": fields.flag("use_qkv_bias"), "qk_norm": norm}, norms=parallel)


def _nanochat(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    assert layer.mixer.rope is not None
    return with_parts(layer, mixer={"rope": replace(layer.mixer.rope, backward=True)})


def _normed_embedding(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    return replace(spec, embedding_norm=True)


def _starcoder2(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    bias = fields.flag("use_bias", True)
    return with_parts(layer, mixer={"qkv_bias": bias, "out_bias": bias}, mlp={"bias": bias})


FAMILIES: dict[str, Family] = {
    "SeedOssForCausalLM": Family(
        defaults={"attention_bias": True, "head_dim": 128, "max_position_embeddings": 524288},
        read_layer=_seed_oss,
    ),
    "SmolLM3ForCausalLM": Family(
        windows="by type",
        defaults={
            "rope_theta": 2e6,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window_pattern": 1,
            "no_rope_layer_interval": 4,
            "num_key_value_heads": 4,
        },
        read_layer=_smollm3,
    ),
    "CwmForCausalLM": Family(
        windows="by type",
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "max_position_embeddings": 131072,
            "sliding_window": 8192,
            "sliding_window_pattern": 4,
        },
        mixer={"qkv_bias": False, "out_bias": False},
        read_layer=_cwm,
    ),
    "MinistralForCausalLM": Family(
        windows="from",
        defaults={"max_position_embeddings": 131072, "sliding_window": 4096},
        mixer={"qkv_bias": False, "out_bias": False},
    ),
    "ArceeForCausalLM": Family(
        modules=_NO_GATE,
        activations=_PLAIN,
        mlp={"gated": False},
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    ),
    "ApertusForCausalLM": Family(
        modules=ModuleNames(up=("mlp.up_proj",), norms=("attention_layernorm", "feedforward_layernorm")),
        activations=("xielu",),
        mixer={"qk_norm": QKNormSpec()},
        mlp={"gated": False, "bias": False},
        defaults={
            "hidden_act": "xielu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 12e6,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "max_position_embeddings": 65536,
        },
    ),
    "NemotronForCausalLM": Family(
        names={"rms_norm_eps": "norm_eps"},
        modules=_NO_GATE,
        activations=_PLAIN,
        partial_rotary=True,
        mlp={"gated": False},
        norms={"kind": "layer", "bias": True, "unit_offset": True},
        defaults={
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 4096,
        },
    ),
    "NanoChatForCausalLM": Family(
        modules=ModuleNames(up=("mlp.fc1",), down="mlp.fc2"),
        activations=_PLAIN,
        mixer={"qk_norm": QKNormSpec(weights="none", behind_rope=True)},
        mlp={"gated": False, "bias": False},
        norms={"weight": False},
        defaults={"hidden_act": "relu2", "final_logit_softcapping": 15.0},
        read_layer=_nanochat,
        read_model=_normed_embedding,
    ),
    "Jais2ForCausalLM": Family(
        names={"rms_norm_eps": "layer_norm_eps"},
        modules=_NO_GATE,
        activations=_PLAIN,
        mlp={"gated": False},
        norms={"kind": "layer", "bias": True},
        defaults={
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "mlp_bias": True,
            "max_position_embeddings": 8192,
        },
    ),
    "StableLmForCausalLM": Family(
        names={"rms_norm_eps": "layer_norm_eps"},
        modules=ModuleNames(query_norm="self_attn.q_layernorm", key_norm="self_attn.k_layernorm"),
        partial_rotary=True,
        mixer={"out_bias": False},
        mlp={"bias": False},
        norms={"kind": "layer", "bias": True},
        defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "max_position_embeddings": 4096},
        read_layer=_stablelm,
    ),
    "Starcoder2ForCausalLM": Family(
        names={"rms_norm_eps": "norm_epsilon"},
        modules=ModuleNames(up=("mlp.c_fc",), down="mlp.c_proj"),
        windows="all",
        activations=("gelu_pytorch_tanh", "gelu", "gelu_new"),
        mlp={"gated": False},
        norms={"kind": "layer", "bias": True},
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
        read_layer=_starcoder2,
    ),
}
