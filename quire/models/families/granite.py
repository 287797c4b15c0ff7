"""Granite and HyperCLOVA X: Llama with factors of embeddings, sublayers, scores and logits (Yang et al. 2022, μP)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.layers import in_turn
from quire.models.families.mixtures import experts_in_place_of_mlps
from quire.models.kv_cache_groups import read_window
from quire.models.layer_spec import LayerSpec, with_parts

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec

_PERI = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")


def granite_layer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with its scale of scores and, in the norm's epsilon, the factor m of what sublayers add.

    The stream is kept divided by m: x / m += sublayer(norm(x / m)). With an epsilon that is divided by m², norms of it
    are norms of x.
    """
    factor = fields.number("residual_multiplier", 1.0)
    scale, eps = fields.number("attention_multiplier", 1.0), layer.norms.eps / factor**2
    return with_parts(layer, mixer={"scale": scale}, norms={"eps": eps})


def granite_model(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    """Return the model with the factors of its embeddings, which are divided as the stream is, and of its logits."""
    embedding = fields.number("embedding_multiplier", 1.0) / fields.number("residual_multiplier", 1.0)
    return replace(spec, embedding_scale=embedding, logit_scale=1 / fields.number("logits_scaling", 1.0))


def _swa_layer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with its own base of rotations, of which 0 is none, and a window in three layers of four."""
    layer = granite_layer(fields, layer, number)
    if fields.get("layer_types") is None:
        layer = with_parts(layer, mixer={"window": read_window(fields) if number % 4 else None})
    thetas, layers = fields.get("layer_rope_theta"), fields.count("num_hidden_layers")
    if thetas is None:
        return layer
    if not isinstance(thetas, list) or len(thetas) != layers:
        raise fields.wrong("layer_rope_theta", f"must be a list of {layers} numbers")
    assert layer.mixer.rope is not None
    theta = fields.positive("layer_rope_theta", thetas[number]) if thetas[number] != 0 else 0.0
    return with_parts(layer, mixer={"rope": replace(layer.mixer.rope, theta=theta) if theta else None})


def _hyperclova_layer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    scale = fields.number("attention_multiplier", layer.mixer.scale)
    around = {"number": 4, "place": "around"} if fields.flag("use_post_norm", True) else {}
    return with_parts(granite_layer(fields, layer, number), mixer={"scale": scale}, norms=around)


def _hyperclova_model(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    family = spec.family
    if not fields.flag("use_post_norm", True):
        family = replace(family, modules=ModuleNames())
    scale = fields.number("logits_scaling", 1.0)
    return replace(granite_model(fields, spec), logit_scale=scale, family=family)


_MIXTURE: dict[str, Any] = {
    "defaults": {"num_experts": 8, "num_experts_per_tok": 2},
    "names": {"shared_expert_intermediate_size": "shared_intermediate_size"},
    "modules": ModuleNames(
        router="block_sparse_moe.router",
        experts="block_sparse_moe.experts",
        shared_up=("shared_mlp.input_linear",),
        shared_down="shared_mlp.output_linear",
    ),
    "read_layer": in_turn(granite_layer, experts_in_place_of_mlps(renormalise=True)),
    "read_model": granite_model,
}
FAMILIES: dict[str, Family] = {
    "GraniteForCausalLM": Family(read_layer=granite_layer, read_model=granite_model),
    "GraniteMoeForCausalLM": Family(**_MIXTURE, only={"shared_intermediate_size": ()}),
    "GraniteMoeSharedForCausalLM": Family(**_MIXTURE),
    "GraniteSWAForCausalLM": Family(
        windows="by type",
        mixer={"sinks": True},
        defaults={
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "sliding_window": 128,
            "sliding_window_pattern": 4,
            "tie_word_embeddings": True,
        },
        read_layer=_swa_layer,
        read_model=granite_model,
    ),
    "HyperCLOVAXForCausalLM": Family(
        modules=ModuleNames(norms=_PERI), read_layer=_hyperclova_layer, read_model=_hyperclova_model
    ),
}
