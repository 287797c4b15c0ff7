"""The architectures that are served, by their names in config.json. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.models.audio.hearing_spec import HEARS
from quire.models.families import (
    bert,
    bloom,
    cohere,
    deepseek,
    delta,
    embedders,
    ernie,
    exaone,
    falcon_h1,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt,
    gpt2,
    gpt_oss,
    gptj,
    granite,
    helium,
    hunyuan,
    hybrids,
    laguna,
    lfm2,
    llama,
    llama4,
    mamba,
    mimo,
    minimax,
    ministral,
    modernbert,
    moe,
    olmo,
    phi,
    phimoe,
    plain,
    qwen,
    renamed,
    speech,
    step,
    zamba2,
)
from quire.models.families.family import Family

_GROUPS = (
    llama,
    llama4,
    qwen,
    phi,
    phimoe,
    gemma,
    gemma3n,
    gemma4,
    gpt,
    gpt2,
    gpt_oss,
    granite,
    exaone,
    falcon_h1,
    plain,
    bloom,
    cohere,
    deepseek,
    delta,
    ernie,
    glm,
    gptj,
    helium,
    hybrids,
    hunyuan,
    laguna,
    lfm2,
    mamba,
    mimo,
    minimax,
    ministral,
    moe,
    olmo,
    renamed,
    step,
    zamba2,
)
FAMILIES: dict[str, Family] = {name: family for group in _GROUPS for name, family in group.FAMILIES.items()}
"""Architectures that generate text."""
POOLED: dict[str, Family] = {
    name: family for group in (bert, modernbert, embedders) for name, family in group.FAMILIES.items()
}
"""Architectures that make vectors or values of texts."""
ALIASES = {
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "MiMoForCausalLM": "Qwen2ForCausalLM",
    "BertSpladeSparseEmbeddingModel": "BertForMaskedLM",
}
"""Other names of architectures, as older checkpoints and vLLM have them."""
HEADS: dict[str, Family] = llama.HEADS
"""Draft heads by their architectures; their layers are Llama's."""
SPEECH: dict[str, Family] = speech.FAMILIES
"""Architectures that write what they hear."""
NATIVE: dict[str, Family] = FAMILIES | POOLED | SPEECH | HEADS
"""All architectures that Quire's own layers compute."""

WRAPPERS = (
    *HEARS,
    "AyaVisionForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration",
    "FastVlmForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "GotOcr2ForConditionalGeneration",
    "Idefics2ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "LightOnOcrForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Ovis2ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "Step3p7ForConditionalGeneration",
    "VideoLlama3ForConditionalGeneration",
    "VideoLlavaForConditionalGeneration",
    "VipLlavaForConditionalGeneration",
)
"""Architectures that also read images or sounds; `text_config` describes their text model. Some towers are in
`models/vision`."""
FLAT = dict.fromkeys(("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"), "Qwen2ForCausalLM")
"""Text models of architectures that older files describe without a `text_config`."""


@dataclass(frozen=True)
class TextModel:
    """The text model that a `text_config` describes.

    Attributes:
        architecture: The text model's own architecture.
        sizes: Values of keys that `text_config` leaves out.
    """

    architecture: str
    sizes: Mapping[str, float | bool]


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


_QWEN_VL = _sizes(8192, 29568, 80, 64, 8, 152064) | {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_window_layers": 80}
_TURNS: dict[str, int] = {"mrope_interleaved": True}
_QWEN3_VL = _TURNS | {"rope_theta": 5e5, "head_dim": 128, "max_position_embeddings": 128000}
_QWEN3_VL_EXPERTS = {
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}

TEXT_MODELS: dict[str, TextModel] = {
    "cohere2": TextModel("Cohere2ForCausalLM", _sizes(8192, 22528, 40, 64, 64, 256000)),
    "deepseek_v3": TextModel("DeepseekV3ForCausalLM", _sizes(7168, 18432, 61, 128, 128, 129280)),
    "exaone4": TextModel("Exaone4ForCausalLM", _sizes(4096, 16384, 32, 32, 32, 102400)),
    "gemma3_text": TextModel("Gemma3ForCausalLM", _sizes(2304, 9216, 26, 8, 4, 262208)),
    "gemma3n_text": TextModel("Gemma3nForCausalLM", _sizes(2048, 16384, 35, 8, 2, 262400)),
    "gemma4_text": TextModel("Gemma4ForCausalLM", _sizes(2304, 9216, 30, 8, 4, 262144)),
    "gemma4_unified_text": TextModel("Gemma4UnifiedForCausalLM", _sizes(2304, 9216, 30, 8, 4, 262144)),
    "gpt_oss": TextModel("GptOssForCausalLM", _sizes(2880, 2880, 36, 64, 8, 201088)),
    "kimi_k2": TextModel("DeepseekV3ForCausalLM", _sizes(7168, 18432, 61, 128, 128, 129280)),
    "lfm2": TextModel("Lfm2ForCausalLM", _sizes(2560, 12288, 32, 32, 8, 65536)),
    "llama": TextModel("LlamaForCausalLM", _sizes(4096, 11008, 32, 32, 32, 32000)),
    "llama4_text": TextModel(
        "Llama4ForCausalLM", _sizes(5120, 8192, 48, 40, 8, 202048) | {"intermediate_size_mlp": 16384}
    ),
    "ministral3": TextModel("Ministral3ForCausalLM", _sizes(4096, 14336, 34, 32, 8, 131072)),
    "mistral4": TextModel("Mistral4ForCausalLM", _sizes(4096, 12288, 36, 32, 32, 131072)),
    "mistral": TextModel("MistralForCausalLM", _sizes(4096, 14336, 32, 32, 8, 32000)),
    "qwen2": TextModel("Qwen2ForCausalLM", _sizes(4096, 22016, 32, 32, 32, 151936)),
    "qwen2_vl_text": TextModel("Qwen2ForCausalLM", _QWEN_VL),
    "qwen2_5_vl_text": TextModel("Qwen2ForCausalLM", _QWEN_VL),
    "qwen3_5_text": TextModel("Qwen3_5ForCausalLM", _sizes(4096, 12288, 32, 16, 4, 248320) | _TURNS),
    "qwen3_5_moe_text": TextModel("Qwen3_5MoeForCausalLM", _sizes(2048, 512, 40, 16, 2, 248320) | _TURNS),
    "qwen3": TextModel("Qwen3ForCausalLM", _sizes(4096, 22016, 32, 32, 32, 151936)),
    "qwen3_vl_text": TextModel("Qwen3ForCausalLM", _sizes(4096, 22016, 32, 32, 32, 151936) | _QWEN3_VL),
    "qwen3_vl_moe_text": TextModel(
        "Qwen3MoeForCausalLM", _sizes(2048, 5632, 24, 16, 16, 151936) | _QWEN3_VL | _QWEN3_VL_EXPERTS
    ),
    "step3p5": TextModel("Step3p5ForCausalLM", _sizes(4096, 11264, 45, 64, 8, 128815)),
    "qwen3_moe": TextModel("Qwen3MoeForCausalLM", _sizes(2048, 6144, 24, 32, 4, 151936)),
}
"""Text models by the `model_type` of their `text_config`."""
