"""Llama, its draft heads, and Mistral and Mixtral."""

from __future__ import annotations

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.mixtures import experts_in_place_of_mlps
from quire.models.layer_spec import LayerSpec, with_parts


def _head_layer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    """Return the layer of a draft head, which reads embeddings and states, each normed."""
    return with_parts(layer, mixer={"inputs": 2 * layer.mixer.inputs}, norms={"number": 3})


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(
        windows="all",
        defaults={"max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "MixtralForCausalLM": Family(
        windows="all",
        modules=ModuleNames(
            router="block_sparse_moe.gate",
            experts="block_sparse_moe.experts",
            expert=("w1", "w3", "w2"),
            others=((".mlp.", ".block_sparse_moe."),),
        ),
        defaults={
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
        },
        read_layer=experts_in_place_of_mlps(),
    ),
}

_EAGLE3 = Family(
    decoder="quire.models.eagle3:Eagle3Head",
    modules=ModuleNames(layer="midlayer", norms=("input_layernorm", "hidden_norm", "post_attention_layernorm")),
    defaults={"num_hidden_layers": 1},
    read_layer=_head_layer,
)
HEADS: dict[str, Family] = {"LlamaForCausalLMEagle3": _EAGLE3, "Eagle3LlamaForCausalLM": _EAGLE3}
"""Draft heads by their architectures."""
