"""The architectures that are served, by their names in config.json. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.models.families import (
    bloom,
    cohere,
    ernie,
    exaone,
    gemma,
    glm,
    gpt,
    gpt2,
    gpt_oss,
    gptj,
    granite,
    helium,
    hunyuan,
    laguna,
    llama,
    llama4,
    ministral,
    moe,
    olmo,
    phi,
    phimoe,
    plain,
    qwen,
    renamed,
)
from quire.models.families.family import Family

_GROUPS = (
    llama,
    llama4,
    qwen,
    phi,
    phimoe,
    gemma,
    gpt,
    gpt2,
    gpt_oss,
    granite,
    exaone,
    plain,
    bloom,
    cohere,
    ernie,
    glm,
    gptj,
    helium,
    hunyuan,
    laguna,
    ministral,
    moe,
    olmo,
    renamed,
)
FAMILIES: dict[str, Family] = {name: family for group in _GROUPS for name, family in group.FAMILIES.items()}
ALIASES = {"PhiMoEForCausalLM": "PhimoeForCausalLM", "LLaMAForCausalLM": "LlamaForCausalLM"}
"""Other names of architectures, as older checkpoints have them."""
HEADS: dict[str, Family] = llama.HEADS
"""Draft heads by their architectures; their layers are Llama's."""

WRAPPERS = (
    "Gemma3ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
)
"""Architectures that also read images; only their text model, which `text_config` describes, is served."""


@dataclass(frozen=True)
class TextModel:
    """The text model that a `text_config` describes.

    Attributes:
        architecture: The text model's own architecture.
        sizes: Values of keys that `text_config` leaves out.
    """

    architecture: str
    sizes: Mapping[str, int]


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


TEXT_MODELS: dict[str, TextModel] = {
    "gemma3_text": TextModel("Gemma3ForCausalLM", _sizes(2304, 9216, 26, 8, 4, 262208)),
    "llama": TextModel("LlamaForCausalLM", _sizes(4096, 11008, 32, 32, 32, 32000)),
    "llama4_text": TextModel(
        "Llama4ForCausalLM", _sizes(5120, 8192, 48, 40, 8, 202048) | {"intermediate_size_mlp": 16384}
    ),
    "ministral3": TextModel("Ministral3ForCausalLM", _sizes(4096, 14336, 34, 32, 8, 131072)),
    "mistral": TextModel("MistralForCausalLM", _sizes(4096, 14336, 32, 32, 8, 32000)),
    "qwen2": TextModel("Qwen2ForCausalLM", _sizes(4096, 22016, 32, 32, 32, 151936)),
    "qwen3": TextModel("Qwen3ForCausalLM", _sizes(4096, 22016, 32, 32, 32, 151936)),
}
"""Text models by the `model_type` of their `text_config`."""
