"""Whisper's decoder: layers like GPT-2's, each of which also attends to an encoder's states (Radford et al. 2022)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire.models.audio.audio_spec import read_speech
from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.layer_spec import AttentionSpec, CrossSpec, LayerSpec

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec


def _layer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    own = layer.mixer
    assert isinstance(own, AttentionSpec)
    length = fields.count("max_source_positions", 1500)
    cross = CrossSpec(own.inputs, own.heads, own.head_dim, length)
    return replace(layer, cross=cross, norms=replace(layer.norms, number=3, place="before, with cross"))


def _model(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    return replace(spec, speech=read_speech(fields.directory))


FAMILIES: dict[str, Family] = {
    "WhisperForConditionalGeneration": Family(
        modules=ModuleNames(
            embedding="model.decoder.embed_tokens",
            positions="model.decoder.embed_positions",
            norm="model.decoder.layer_norm",
            head="proj_out",
            layer="model.decoder.layers.{}",
            norms=("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
            out="self_attn.out_proj",
            up=("fc1",),
            down="fc2",
            unbiased=("self_attn.k_proj",),
            unread=("model.encoder.", "proj_out."),
        ),
        names={
            "hidden_size": "d_model",
            "num_hidden_layers": "decoder_layers",
            "num_attention_heads": "decoder_attention_heads",
            "num_key_value_heads": "decoder_attention_heads",
            "intermediate_size": "decoder_ffn_dim",
            "max_position_embeddings": "max_target_positions",
            "hidden_act": "activation_function",
        },
        only={"scale_embedding": (False,), "tie_word_embeddings": (True,)},
        activations=("gelu",),
        mixer={"rope": None, "qkv_bias": True, "out_bias": True},
        mlp={"gated": False, "bias": True},
        norms={"kind": "layer", "bias": True, "eps": 1e-5},
        defaults={
            "hidden_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "intermediate_size": 1536,
            "max_position_embeddings": 448,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "vocab_size": 51865,
        },
        read_layer=_layer,
        read_model=_model,
    ),
}
