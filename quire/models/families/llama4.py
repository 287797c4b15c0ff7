"""Llama 4: layers that see chunks and are rotated, or see all and are not; experts whose input is weighted."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.layers import in_turn
from quire.models.families.mixtures import experts_in_place_of_mlps
from quire.models.layer_spec import LayerSpec, QKNormSpec, QueryScaleSpec, with_parts

_KINDS = ("chunked_attention", "full_attention")


def _attention(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with a rotation and normed queries and keys, or without both and with scaled queries."""
    layers, rope = fields.count("num_hidden_layers"), layer.mixer.rope
    assert rope is not None
    rotated = fields.get("no_rope_layers") or _usually_rotated(fields, layers)
    if not isinstance(rotated, list) or len(rotated) != layers:
        raise fields.wrong("no_rope_layers", f"must have {layers} entries of 0 and 1")
    kinds = fields.get("layer_types") or [_KINDS[0 if each else 1] for each in rotated]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= set(_KINDS):
        raise fields.wrong("layer_types", f"is not supported: served are {layers} entries of {', '.join(_KINDS)}")
    chunked = kinds[number] == _KINDS[0] and fields.get("attention_chunk_size", 8192) is not None
    chunk = fields.count("attention_chunk_size", 8192) if chunked else None
    if rotated[number]:
        norm = QKNormSpec(weights="none", behind_rope=True) if fields.flag("use_qk_norm", True) else None
        return with_parts(layer, mixer={"chunk": chunk, "rope": replace(rope, interleaved=True), "qk_norm": norm})
    growth, length = fields.number("attn_scale", 0.1), int(fields.number("floor_scale", 8192))
    scaled = fields.get("attn_temperature_tuning", True)  # older files have a number
    scale = QueryScaleSpec(growth, length, first=1) if scaled else None
    return with_parts(layer, mixer={"chunk": chunk, "rope": None, "query_scale": scale})


def _usually_rotated(fields: ConfigFile, layers: int) -> list[bool]:
    step = fields.count("no_rope_layer_interval", 4)
    return [(layer + 1) % step != 0 for layer in range(layers)]


FAMILIES: dict[str, Family] = {
    "Llama4ForCausalLM": Family(
        windows="chunks",
        modules=ModuleNames(
            up=("feed_forward.gate_proj", "feed_forward.up_proj"),
            down="feed_forward.down_proj",
            router="feed_forward.router",
            experts="feed_forward.experts",
            shared_up=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
            shared_down="feed_forward.shared_expert.down_proj",
            transposed_experts=True,
        ),
        names={
            "intermediate_size": "intermediate_size_mlp",
            "moe_intermediate_size": "intermediate_size",
            "decoder_sparse_step": "interleave_moe_layer_step",
        },
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "moe_intermediate_size": 8192,
            "num_shared_experts": 1,
            "num_experts": 16,
            "num_experts_per_tok": 1,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
        },
        only={"num_experts_per_tok": (1,)},
        read_layer=in_turn(_attention, experts_in_place_of_mlps(scoring="sigmoid", on_input=True)),
    ),
}
