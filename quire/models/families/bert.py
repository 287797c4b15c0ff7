"""BERT and encoders with its blocks: ColBERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, ELECTRA and ALBERT."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.models.config_file import ConfigFile
from quire.models.families.encoders import (
    ENCODER,
    ONLY,
    PLAIN,
    POST_NORM,
    chain,
    dense,
    embeddings,
    label_head,
    masked_head,
    with_heads,
)
from quire.models.families.family import Family, ModuleNames
from quire.models.text_head_spec import HeadStep, TextHead, with_label_head
from quire.models.weights.safetensors_files import read_headers

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec

_OLD = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))
_WORDS = "embeddings.word_embeddings"
_BERT = ModuleNames(
    embedding=_WORDS,
    positions="embeddings.position_embeddings",
    token_types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    embedding_projection="embeddings_project",
    norm="",
    layer="encoder.layer.{}",
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    up=("intermediate.dense",),
    down="output.dense",
    others=(*_OLD, ("cls.predictions.bias", f"{_WORDS}.bias")),
    older=(("bert.", ""),),
)
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "rms_norm_eps": 1e-12,
}
_BERT_UNREAD = ("pooler.", "cls.", "classifier.", f"{_WORDS}.bias")
_COLBERT_DIM = 128
"""Length of ColBERT's vectors where neither the weights nor config.json say it."""
_COMMON: dict[str, Any] = {
    "decoder": ENCODER,
    "modules": _BERT,
    "names": {"rms_norm_eps": "layer_norm_eps", "num_key_value_heads": "num_attention_heads"},
    "defaults": _DEFAULTS,
    "only": ONLY,
    "activations": PLAIN,
    "mixer": {"rope": None, "two_sided": True, "qkv_bias": True, "out_bias": True},
    "mlp": {"gated": False, "bias": True},
    "norms": POST_NORM,
}


def _roberta_positions(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    """Return the spec with positions that begin behind the padding token's id (Liu et al. 2019, fairseq's custom)."""
    offset = fields.natural("pad_token_id", 1) + 1
    if spec.max_model_len <= offset:
        raise fields.wrong("max_position_embeddings", f"must be over {offset}, where positions begin")
    return replace(spec, position_offset=offset, max_model_len=spec.max_model_len - offset)


def _narrow_embeddings(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    width = fields.count("embedding_size")
    return replace(spec, embedding_width=0 if width == spec.hidden else width)


def _always_narrow_embeddings(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    return replace(spec, embedding_width=fields.count("embedding_size"))


def _out_proj(activation: str) -> Any:
    """Return a reader of RoBERTa's head for labels."""

    def read(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
        steps = (HeadStep("classifier.dense", spec.hidden, activation=activation),)
        return with_label_head(fields, spec, steps, HeadStep("classifier.out_proj", 0), "cls")

    return read


def _vectors_of_tokens(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    """Return the spec with ColBERT's projection of states, which is as wide as its weight."""
    stored = read_headers(fields.directory).get("linear.weight")
    width = stored[0] if stored else fields.count("dim", _COLBERT_DIM)
    return replace(spec, text_head=TextHead((HeadStep("linear", width, bias=False),), "all", embeds=True))


_ROBERTA = replace(
    _BERT,
    older=(("roberta.", ""),),
    others=(*_OLD, ("lm_head.bias", f"{_WORDS}.bias"), ("lm_head.layer_norm", "lm_head.norm")),
)
_ROBERTA_DEFAULTS = _DEFAULTS | {"vocab_size": 50265}
_ROBERTA_UNREAD = ("pooler.", "lm_head.", "classifier.", f"{_WORDS}.bias")
_DISTILBERT = replace(
    _BERT,
    layer="transformer.layer.{}",
    norms=("sa_layer_norm", "output_layer_norm"),
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    up=("ffn.lin1",),
    down="ffn.lin2",
    others=(*_OLD, ("vocab_projector.bias", f"{_WORDS}.bias")),
    older=(("distilbert.", ""),),
)
_ELECTRA = replace(_BERT, others=(*_OLD, ("generator_lm_head.bias", f"{_WORDS}.bias")), older=(("electra.", ""),))
_ALBERT = replace(
    _BERT,
    embedding_projection="encoder.embedding_hidden_mapping_in",
    layer="encoder.albert_layer_groups.0.albert_layers.0",
    norms=("attention.LayerNorm", "full_layer_layer_norm"),
    qkv=("attention.query", "attention.key", "attention.value"),
    out="attention.dense",
    up=("ffn",),
    down="ffn_output",
    others=(*_OLD, ("predictions.bias", f"{_WORDS}.bias")),
    older=(("albert.", ""),),
)


def _roberta(prefix: str, defaults: dict[str, Any]) -> dict[str, Family]:
    return with_heads(
        prefix,
        _COMMON | {"modules": _ROBERTA, "defaults": defaults},
        chain(embeddings, _roberta_positions),
        _ROBERTA_UNREAD,
        _out_proj("tanh"),
        masked=masked_head("lm_head.dense", "lm_head.norm", _WORDS),
    )


FAMILIES: dict[str, Family] = {
    **with_heads(
        "Bert",
        _COMMON,
        embeddings,
        _BERT_UNREAD,
        label_head(dense("pooler.dense", "tanh"), "cls"),
        masked=masked_head("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", _WORDS),
    ),
    "HF_ColBERT": Family(
        **_COMMON | {"modules": replace(_BERT, unread=_BERT_UNREAD)}, read_model=chain(embeddings, _vectors_of_tokens)
    ),
    **_roberta("Roberta", _ROBERTA_DEFAULTS),
    **_roberta("XLMRoberta", _DEFAULTS),
    **_roberta("Camembert", _DEFAULTS),
    **with_heads(
        "DistilBert",
        _COMMON
        | {
            "modules": _DISTILBERT,
            "names": {
                "hidden_size": "dim",
                "num_hidden_layers": "n_layers",
                "num_attention_heads": "n_heads",
                "num_key_value_heads": "n_heads",
                "intermediate_size": "hidden_dim",
                "hidden_act": "activation",
                "rms_norm_eps": "layer_norm_eps",
            },
            "defaults": _DEFAULTS | {"num_hidden_layers": 6, "type_vocab_size": 0},
        },
        embeddings,
        ("vocab_", "pre_classifier.", "classifier.", f"{_WORDS}.bias"),
        label_head(dense("pre_classifier", "relu"), "cls"),
        masked=masked_head("vocab_transform", "vocab_layer_norm", _WORDS),
    ),
    **with_heads(
        "Electra",
        _COMMON
        | {
            "modules": _ELECTRA,
            "defaults": _DEFAULTS
            | {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024, "embedding_size": 128},
        },
        chain(embeddings, _narrow_embeddings),
        ("discriminator_predictions.", "generator_", "classifier.", f"{_WORDS}.bias"),
        _out_proj("gelu"),
        masked=masked_head("generator_predictions.dense", "generator_predictions.LayerNorm", _WORDS),
    ),
    **with_heads(
        "Albert",
        _COMMON
        | {
            "modules": _ALBERT,
            "only": {**ONLY, "num_hidden_groups": (1,), "inner_group_num": (1,)},
            "defaults": _DEFAULTS
            | {
                "vocab_size": 30000,
                "hidden_size": 4096,
                "num_attention_heads": 64,
                "intermediate_size": 16384,
                "hidden_act": "gelu_new",
                "embedding_size": 128,
            },
        },
        chain(embeddings, _always_narrow_embeddings),
        ("pooler.", "predictions.", "sop_classifier.", "classifier.", f"{_WORDS}.bias"),
        label_head(dense("pooler", "tanh"), "cls"),
        masked=masked_head("predictions.dense", "predictions.LayerNorm", _WORDS),
    ),
}
