"""Encoders with rotary positions: ModernBERT, Nomic BERT, GTE and EuroBERT."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.models.config_file import ConfigFile
from quire.models.families.encoders import (
    CLASSIFIER,
    ENCODER,
    POST_NORM,
    dense,
    embeddings,
    label_head,
    no_change,
    with_heads,
)
from quire.models.families.family import Family, ModuleNames
from quire.models.layer_spec import LayerSpec, with_parts
from quire.models.rope_spec import read_local_rope
from quire.models.text_head_spec import HeadPooling, HeadStep, TextHead, with_label_head

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec

_ROPES = Family(local_rope=True)


def _modernbert_layer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with its window, which is `local_attention` // 2 tokens to each side; the first has no norm
    before attention.
    """
    layer = with_parts(layer, norms={"bias": fields.flag("norm_bias"), "number": 2 if number else 1})
    if not _is_local(fields, number):
        return layer
    rope = read_local_rope(fields, _ROPES, layer.mixer.head_dim)
    return with_parts(layer, mixer={"window": fields.count("local_attention") // 2 + 1, "rope": rope})


def _is_local(fields: ConfigFile, number: int) -> bool:
    kinds, layers = fields.get("layer_types"), fields.count("num_hidden_layers")
    if kinds is None:
        return number % fields.count("global_attn_every_n_layers") != 0
    served = {"full_attention": False, "sliding_attention": True}
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in served for kind in kinds):
        raise fields.wrong("layer_types", f"must name full_attention or sliding_attention for each of {layers} layers")
    return served[kinds[number]]


def _prediction_head(fields: ConfigFile, spec: ModelSpec) -> tuple[HeadStep, ...]:
    activation = str(fields.get("classifier_activation", "gelu"))
    return (HeadStep("head.dense", spec.hidden, fields.flag("classifier_bias"), activation, "head.norm"),)


def _modernbert_labels(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    pooling = fields.choice("classifier_pooling", ("cls", "mean"), "cls")
    steps = _prediction_head(fields, spec)
    return with_label_head(fields, spec, steps, CLASSIFIER, "mean" if pooling == "mean" else "cls")


def _modernbert_masked(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    last = HeadStep("embeddings.tok_embeddings", spec.vocab_size, fields.flag("decoder_bias", True))
    return replace(spec, text_head=TextHead((*_prediction_head(fields, spec), last), "all"))


def _nomic_layer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    return with_parts(layer, mlp={"activation": "silu"})  # which other files call swiglu


def _eurobert_labels(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    poolings: dict[str, HeadPooling] = {"bos": "cls", "mean": "mean", "late": "late"}
    pooling = fields.choice("classifier_pooling", tuple(poolings), "late")
    steps = (HeadStep("dense", spec.hidden, activation="gelu"),)
    return with_label_head(fields, spec, steps, CLASSIFIER, poolings[pooling])


_MODERNBERT = ModuleNames(
    embedding="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    norm="final_norm",
    layer="layers.{}",
    norms=("attn_norm", "mlp_norm"),
    qkv=("attn.Wqkv",),
    out="attn.Wo",
    up=("mlp.Wi",),
    down="mlp.Wo",
    older=(("model.", ""),),
    others=(("decoder.bias", "embeddings.tok_embeddings.bias"),),
)
_NOMIC = ModuleNames(
    embedding="embeddings.word_embeddings",
    token_types="embeddings.token_type_embeddings",
    embedding_norm="emb_ln",
    norm="",
    layer="encoder.layers.{}",
    norms=("norm1", "norm2"),
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
    older=(("nomic_bert.", ""), ("bert.", "")),
)
_GTE = ModuleNames(
    embedding="embeddings.word_embeddings",
    token_types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    norm="",
    layer="encoder.layer.{}",
    norms=("attn_ln", "mlp_ln"),
    qkv=("attention.qkv_proj",),
    out="attention.o_proj",
    up=("mlp.up_gate_proj",),
    up_first=True,
    down="mlp.down_proj",
    older=(("new.", ""), ("gte.", "")),
)
_FIRST_NAMES = {
    "hidden_size": ("hidden_size", "n_embd"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_key_value_heads": ("num_attention_heads", "n_head"),
    "intermediate_size": ("intermediate_size", "n_inner"),
    "max_position_embeddings": ("max_position_embeddings", "max_trained_positions", "n_positions"),
    "hidden_act": ("hidden_act", "activation_function"),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon"),
    "rope_theta": ("rope_theta", "rotary_emb_base"),
}
_NOMIC_ONLY: dict[str, tuple[object, ...]] = {
    "prenorm": (False,),
    "qkv_proj_bias": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_interleaved": (False,),
    "rotary_scaling_factor": (),
    "use_rms_norm": (False,),
    "num_experts": (0,),
}
_GTE_FAMILY: dict[str, Any] = {
    "decoder": ENCODER,
    "modules": _GTE,
    "names": {"rms_norm_eps": "layer_norm_eps", "num_key_value_heads": "num_attention_heads"},
    "defaults": {
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-12,
        "rope_theta": 160000.0,
        "max_position_embeddings": 8192,
        "type_vocab_size": 1,
    },
    "only": {
        "position_embedding_type": ("rope",),
        "layer_norm_type": ("layer_norm",),
        "logn_attention_scale": (False,),
    },
    "activations": ("gelu", "silu"),
    "mixer": {"two_sided": True, "qkv_bias": True, "out_bias": True},
    "mlp": {"down_bias": True},
    "norms": POST_NORM,
}
_GTE_UNREAD = ("pooler.", "lm_head.", "classifier.")


def _gte(prefix: str) -> dict[str, Family]:
    labels = label_head(dense("pooler.dense", "tanh"), "cls")
    return with_heads(prefix, _GTE_FAMILY, embeddings, _GTE_UNREAD, labels)


FAMILIES: dict[str, Family] = {
    **with_heads(
        "ModernBert",
        {
            "decoder": ENCODER,
            "modules": _MODERNBERT,
            "names": {
                "hidden_act": "hidden_activation",
                "num_key_value_heads": "num_attention_heads",
                "rms_norm_eps": "norm_eps",
                "rope_theta": "global_rope_theta",
                "rope_local_base_freq": "local_rope_theta",
            },
            "defaults": {
                "hidden_act": "gelu",
                "rms_norm_eps": 1e-5,
                "rope_theta": 160000.0,
                "max_position_embeddings": 8192,
                "local_attention": 128,
                "global_attn_every_n_layers": 3,
            },
            "activations": ("gelu", "silu", "gelu_pytorch_tanh"),
            "windows": "chunks",
            "local_rope": True,
            "mixer": {"two_sided": True},
            "norms": {"kind": "layer", "number": 2},
            "read_layer": _modernbert_layer,
        },
        embeddings,
        ("head.", "decoder.", "classifier.", "embeddings.tok_embeddings.bias"),
        _modernbert_labels,
        token=label_head(_prediction_head, "all"),
        masked=_modernbert_masked,
    ),
    **with_heads(
        "NomicBert",
        {
            "decoder": ENCODER,
            "modules": _NOMIC,
            "names": _FIRST_NAMES,
            "defaults": {
                "hidden_act": "silu",
                "rms_norm_eps": 1e-12,
                "rope_theta": 1000.0,
                "max_position_embeddings": 2048,
                "type_vocab_size": 2,
            },
            "only": _NOMIC_ONLY,
            "activations": ("silu", "swiglu"),
            "mixer": {"two_sided": True},
            "norms": POST_NORM,
            "read_layer": _nomic_layer,
        },
        embeddings,
        ("pooler.", "cls.", "classifier."),
        label_head(dense("pooler.dense", "tanh"), "cls"),
    ),
    **_gte("Gte"),
    **_gte("New"),
    **with_heads(
        "EuroBert",
        {
            "decoder": ENCODER,
            "defaults": {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192},
            "modules": ModuleNames(),
            "mixer": {"two_sided": True},
        },
        no_change,
        ("lm_head.", "dense.", "classifier."),
        _eurobert_labels,
    ),
}
