"""Gemma: norm weights stored less one, and a scaled embedding; from Gemma 2 on, norms around attention and MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.layer_spec import QKNormSpec

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec


def _scaled_embedding(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    return replace(spec, embedding_scale=spec.hidden**0.5)


def _third(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    """Return the model with as many positions as the file says: scaled ones are among them already."""
    return replace(_scaled_embedding(fields, spec), max_model_len=fields.count("max_position_embeddings"))


AROUND = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
"""Names of a layer's norms around attention and MLP."""
_GEMMA: dict[str, Any] = {
    "modules": ModuleNames(norms=AROUND),
    "names": {"hidden_act": "hidden_activation"},
    "windows": "by type",
    "norms": {"unit_offset": True, "number": 4, "place": "around"},
    "read_model": _scaled_embedding,
    "overflows_float16": True,
}
_DEFAULTS = {
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2 = _DEFAULTS | {
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 8192,
}
_VAULT = ModuleNames(norms=("input_layernorm", "pre_feedforward_layernorm"))
FAMILIES: dict[str, Family] = {
    "GemmaForCausalLM": Family(
        norms={"unit_offset": True},
        read_model=_scaled_embedding,
        overflows_float16=True,
        mlp={"bias": False},
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "head_dim": 256,
            "num_key_value_heads": 16,
            "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
        },
    ),
    "VaultGemmaForCausalLM": Family(
        **_GEMMA | {"norms": {"unit_offset": True}, "modules": _VAULT},
        defaults=_GEMMA2,
    ),
    "Gemma2ForCausalLM": Family(
        **_GEMMA,
        defaults=_GEMMA2,
    ),
    "Gemma3ForCausalLM": Family(
        **_GEMMA | {"read_model": _third},
        mixer={"qk_norm": QKNormSpec()},
        local_rope=True,
        only={"attn_logit_softcapping": ()},
        defaults=_DEFAULTS
        | {
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
        },
    ),
}
