"""Command R and Command A: attention and MLP in parallel, layer norms without biases, and scaled logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.layers import in_turn, interleaved
from quire.models.families.mixtures import experts_in_place_of_mlps, has_experts
from quire.models.layer_spec import LayerSpec, QKNormSpec, with_parts

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec


def _normed(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    norm = QKNormSpec("layer", weights="by head") if fields.flag("use_qk_norm") else None
    return with_parts(interleaved(fields, layer, number), mixer={"qk_norm": norm})


def _rotated_in_windows(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    if layer.mixer.window is None:
        return with_parts(layer, mixer={"rope": None})
    return interleaved(fields, layer, number)


def _scaled_logits(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    return replace(spec, logit_scale=fields.number("logit_scale", 0.0625))


def _moe_attention(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer with its norm; it is rotated if it has a window, or is one of the first with an MLP."""
    forced = fields.natural("prefix_dense_sliding_window_pattern", 1) == 1 and not has_experts(fields, number)
    layer = interleaved(fields, layer, number) if forced else _rotated_in_windows(fields, layer, number)
    if fields.natural("first_k_dense_replace", 0) and fields.get("layer_types") is None:
        raise fields.wrong("first_k_dense_replace", "is not supported without layer_types")
    width = fields.count("prefix_dense_intermediate_size", fields.count("intermediate_size"))
    if not has_experts(fields, number):
        layer = with_parts(layer, mlp={"width": width})
    if fields.get("rms_norm_eps") is not None:
        return with_parts(layer, norms={"kind": "rms", "eps": fields.number("rms_norm_eps", 1e-5)})
    return with_parts(layer, norms={"eps": fields.number("layer_norm_eps", 1e-5)})


def _experts(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    scoring = fields.choice("expert_selection_fn", ("softmax", "sigmoid"), "softmax")
    factor = {"sum": 1.0, "average": 0.5}[
        fields.choice("shared_expert_combination_strategy", ("sum", "average"), "average")
    ]
    renormalise = scoring == "softmax" or fields.flag("norm_topk_prob", True)
    read = experts_in_place_of_mlps(factor=factor, scoring=scoring, renormalise=renormalise)
    return read(fields, layer, number)


_COHERE: dict[str, Any] = {
    "modules": ModuleNames(norms=("input_layernorm",)),
    "names": {"rms_norm_eps": "layer_norm_eps"},
    "norms": {"kind": "layer", "number": 1, "place": "parallel"},
    "read_model": _scaled_logits,
}
_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": True}
FAMILIES: dict[str, Family] = {
    "CohereForCausalLM": Family(**_COHERE, defaults=_DEFAULTS | {"rope_theta": 500000.0}, read_layer=_normed),
    "Cohere2ForCausalLM": Family(
        **_COHERE,
        windows="by type",
        defaults=_DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4},
        read_layer=_rotated_in_windows,
    ),
    "Cohere2MoeForCausalLM": Family(
        modules=_COHERE["modules"],
        norms=_COHERE["norms"],
        read_model=_scaled_logits,
        windows="by type",
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        read_layer=in_turn(_moe_attention, _experts),
    ),
}
