"""Reads the layers of a decoder from config.json, as Llama has them and with what a family changes.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ReadLayer
from quire.models.kv_cache_groups import read_window, read_windowed_layers
from quire.models.layer_spec import AttentionSpec, LayerSpec, Mixer, MlpSpec, NormSpec, with_parts
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
    layers = _of_both_sides(fields, family, layers)
    for layer in layers:
        _check(fields, layer.mixer)
    return layers


def _of_both_sides(fields: ConfigFile, family: Family, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Return the layers, whose attention is two-sided if the file says so.

    With `use_bidirectional_attention`, half of the window lies to each side, as in transformers' Gemma 3; with
    `is_causal`, the whole window.
    """
    key = "use_bidirectional_attention"
    of_images = fields.get(key) in family.only.get(key, ())  # texts are not
    halves = not of_images and fields.flag(key)
    if not halves and fields.flag("is_causal", True):
        return layers
    both = []
    for layer in layers:
        own = layer.mixer
        if not isinstance(own, AttentionSpec) or own.chunk is not None or own.slopes:
            raise fields.wrong(key if halves else "is_causal", "is not supported by this architecture")
        window = own.window
        window = window // 2 + 1 if halves and window is not None else window
        both.append(with_parts(layer, mixer={"two_sided": True, "window": window}))
    return tuple(both)


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


def _check(fields: ConfigFile, attention: Mixer) -> None:
    if attention.heads % attention.kv_heads:
        raise fields.wrong("num_key_value_heads", f"must divide num_attention_heads ({attention.heads})")
    if attention.rope and attention.rope.width(attention.rotated) % 2:
        raise fields.wrong("head_dim", "must be even")


def _mlp(fields: ConfigFile, family: Family) -> MlpSpec:
    hidden, gated = fields.count("hidden_size"), family.mlp.get("gated", True)
    width = fields.count_of_all("intermediate_size", None if gated else 4 * hidden)
    activation = fields.choice("hidden_act", family.activations, "silu")
    mlp = MlpSpec(hidden, width, activation, bias=fields.flag("mlp_bias"))
    return replace(mlp, **family.mlp)


def _norms(fields: ConfigFile, family: Family) -> NormSpec:
    return replace(NormSpec("rms", fields.number("rms_norm_eps", 1e-6), number=2), **family.norms)
