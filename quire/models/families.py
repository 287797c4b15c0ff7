"""The architectures that are served: the class of each, its fixed properties, and its names of config.json's keys.

A model that differs from a listed one by flags is one more entry here. A model that computes differently needs a file
beside `decoder.py` too. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

GATED = ("silu", "gelu_pytorch_tanh")
"""Activations of MLPs with a gate."""
_QWEN = {"use_sliding_window": False, "max_window_layers": 28, "max_position_embeddings": 32768}
_GEMMA = "quire.models.gemma:Gemma"
GEMMA_NAMES = {"hidden_act": "hidden_activation"}
GEMMA = {
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
}


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        decoder: The class that builds the model, as "module:class".
        names: The architecture's names of keys, by Llama's names.
        defaults: Values of missing keys, where they differ from Llama's.
        activations: The values of `hidden_act` that are served.
        qkv_bias: Whether queries, keys and values have biases; None: `attention_bias` decides.
        biases: Whether all projections and norms have biases.
        qk_norm: Whether queries and keys are normed, head by head.
        norms: Number of norms in a layer: layer norms if `biases`, otherwise RMS norms.
        unit_offset: Whether norm weights are stored minus one.
        fused: Whether queries, keys and values are stored as one projection, and gate and up as another.
        gated: Whether the MLP has a gate.
        rotary: Whether positions rotate queries and keys; otherwise, positions are learned embeddings.
        local_rope: Whether layers with a window have a rotary embedding of their own.
        partial_rotary: Whether `partial_rotary_factor` is read.
        windows: Which layers have the `sliding_window`: none, all, or the ones that `layer_types` names. With `from`,
            `layer_types` names them too; without `layer_types`, they are the layers from `max_window_layers` on.
        experts: Whether layers may have experts in place of their MLP.
        overflows_float16: Whether activations become larger than float16 can hold.
    """

    decoder: str = "quire.models.decoder:Decoder"
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activations: tuple[str, ...] = GATED
    qkv_bias: bool | None = None
    biases: bool = False
    qk_norm: bool = False
    norms: int = 2
    unit_offset: bool = False
    fused: bool = False
    gated: bool = True
    rotary: bool = True
    local_rope: bool = False
    partial_rotary: bool = False
    windows: Literal["none", "all", "by type", "from"] = "none"
    experts: bool = False
    overflows_float16: bool = False


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(
        windows="all",
        defaults={"max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": Family(
        windows="from",
        qkv_bias=True,
        defaults=_QWEN,
    ),
    "Qwen3ForCausalLM": Family(
        windows="from",
        qk_norm=True,
        defaults=_QWEN | {"head_dim": 128},
    ),
    "MixtralForCausalLM": Family(
        windows="all",
        experts=True,
        defaults={
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
        },
    ),
    "Qwen3MoeForCausalLM": Family(
        windows="all",
        experts=True,
        qk_norm=True,
        defaults={
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "use_sliding_window": False,
            "max_position_embeddings": 32768,
        },
    ),
    "Phi3ForCausalLM": Family(
        windows="all",
        fused=True,
        partial_rotary=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
    ),
    "Gemma2ForCausalLM": Family(
        decoder=_GEMMA,
        windows="by type",
        overflows_float16=True,
        norms=4,
        unit_offset=True,
        names=GEMMA_NAMES,
        defaults=GEMMA
        | {
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "max_position_embeddings": 8192,
        },
    ),
    "Gemma3ForCausalLM": Family(
        decoder=_GEMMA,
        windows="by type",
        overflows_float16=True,
        norms=4,
        unit_offset=True,
        qk_norm=True,
        local_rope=True,
        names=GEMMA_NAMES,
        defaults=GEMMA
        | {
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
        },
    ),
    "GPT2LMHeadModel": Family(
        decoder="quire.models.gpt2:GPT2",
        names={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "num_key_value_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        defaults={
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 1024,
            "vocab_size": 50257,
            "hidden_act": "gelu_new",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        activations=("gelu_new", "gelu_pytorch_tanh"),
        biases=True,
        fused=True,
        gated=False,
        rotary=False,
    ),
}

HEADS: dict[str, str] = {
    "LlamaForCausalLMEagle3": "quire.models.eagle3:Eagle3Head",
    "Eagle3LlamaForCausalLM": "quire.models.eagle3:Eagle3Head",
}
"""Draft heads' architectures → "module:class"; their layers are Llama's."""

WRAPPERS = (
    "Gemma3ForConditionalGeneration",
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
    "mistral": TextModel("MistralForCausalLM", _sizes(4096, 14336, 32, 32, 8, 32000)),
    "qwen2": TextModel("Qwen2ForCausalLM", _sizes(4096, 22016, 32, 32, 32, 151936)),
    "qwen3": TextModel("Qwen3ForCausalLM", _sizes(4096, 22016, 32, 32, 32, 151936)),
}
"""Text models by the `model_type` of their `text_config`."""
