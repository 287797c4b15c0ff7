"""Reads the layers of a decoder from config.json, as Llama has them and with what a family changes.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ReadLayer
from quire.models.kv_cache_groups import read_window, read_windowed_layers
from quire.models.layer_spec import AttentionSpec, LayerSpec, MlpSpec, NormSpec, with_parts
from quire.models.rope_spec import read_local_rope, read_rope


def read_layers(fields: ConfigFile, family: Family) -> tuple[LayerSpec, ...]:
    """Return all layers, in order.

    Raises:
        CheckpointError: The file asks for something that is not served; the message names the key.
    """
    usual = LayerSpec(_attention(fields, family), _mlp(fields, family), _norms(fields, family))
    windowed, read = usual, family.read_layer
    if (window := read_window(fields)) is not None:
        local_rope = read_local_rope(fields, family, usual.mixer.head_dim) or usual.mixer.rope
        windowed = with_parts(usual, mixer={"window": window, "rope": local_rope})
    kinds = read_windowed_layers(fields, family, fields.count("num_hidden_layers"))
    layers = tuple(windowed if is_windowed else usual for is_windowed in kinds)
    layers = tuple(with_parts(layer, mixer=family.mixer) for layer in layers) if family.mixer else layers
    layers = tuple(read(fields, layer, number) for number, layer in enumerate(layers)) if read else layers
    for layer in layers:
        _check(fields, layer.mixer)
    return layers


def interleaved(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with a rotation of interleaved pairs, if it has a rotation."""
    rope = layer.mixer.rope
    return layer if rope is None else with_parts(layer, mixer={"rope": replace(rope, interleaved=True)})


def in_turn(*readers: ReadLayer) -> ReadLayer:
    """Return a reader that changes a layer by each of these, one after the other."""

    def read(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
        for reader in readers:
            layer = reader(fields, layer, number)
        return layer

    return read


def _attention(fields: ConfigFile, family: Family) -> AttentionSpec:
    """Return the attention of a layer without a window."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    head_dim = fields.count("head_dim", max(1, hidden // heads))
    bias = fields.flag("attention_bias")
    return AttentionSpec(
        inputs=hidden,
        outputs=hidden,
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=fields.number("query_pre_attn_scalar", head_dim) ** -0.5,
        cap=fields.optional_number("attn_logit_softcapping"),
        rope=read_rope(fields, family, head_dim),
        qkv_bias=bias,
        out_bias=bias,
    )


def _check(fields: ConfigFile, attention: AttentionSpec) -> None:
    if attention.heads % attention.kv_heads:
        raise fields.wrong("num_key_value_heads", f"must divide num_attention_heads ({attention.heads})")
    if attention.rope and attention.rope.width(attention.head_dim) % 2:
        raise fields.wrong("head_dim", "must be even")


def _mlp(fields: ConfigFile, family: Family) -> MlpSpec:
    hidden, gated = fields.count("hidden_size"), family.mlp.get("gated", True)
    width = fields.count("intermediate_size", None if gated else 4 * hidden)
    activation = fields.choice("hidden_act", family.activations, "silu")
    mlp = MlpSpec(hidden, width, activation, bias=fields.flag("mlp_bias"))
    return replace(mlp, **family.mlp)


def _norms(fields: ConfigFile, family: Family) -> NormSpec:
    return replace(NormSpec("rms", fields.number("rms_norm_eps", 1e-6), number=2), **family.norms)
