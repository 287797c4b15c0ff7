"""Which architectures are served: the class of each, what it fixes without writing it in config.json, and how it writes
the rest.

A model that differs from a listed one by flags is one more entry here; one that differs in `forward` is a file beside
`decoder.py` as well. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

GATED = ("silu", "gelu_pytorch_tanh")
"""Activations of gated MLPs."""
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
        decoder: The class that builds it, as "module:class".
        names: Its keys, by the keys that Llama uses for the same.
        defaults: What its silence means, where that differs from Llama's.
        activations: The values of `hidden_act` that it is served with.
        qkv_bias: Whether queries, keys and values have biases; None: as `attention_bias` says.
        biases: All projections have one, and so have the norms.
        qk_norm: Queries and keys are normed, head by head.
        norms: RMS norms a layer, or LayerNorms where `biases`.
        unit_offset: Norm weights are stored less one.
        fused: Queries, keys and values are stored as one projection, gate and up as another.
        gated: The MLP has a gate.
        rotary: Positions turn queries and keys; otherwise they are learned embeddings.
        local_rope: Layers with a window have a rotary embedding of their own.
        partial_rotary: `partial_rotary_factor` is read.
        windows: Which layers `sliding_window` is for: none, all, those that `layer_types` names; `from` is the last
            with `max_window_layers` as the first of them, where `layer_types` is silent.
        experts: Layers may have experts in place of their MLP.
        overflows_float16: Its activations go beyond what float16 holds.
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
"""Architectures of heads that propose tokens for another model → "module:class"; their layers are Llama's."""

WRAPPERS = (
    "Gemma3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
)
"""Architectures that read images too, and whose text model, described by `text_config`, is served alone."""


@dataclass(frozen=True)
class TextModel:
    """What a `text_config` describes.

    Attributes:
        architecture: Of the text model alone.
        sizes: What its silence means.
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
"""By `model_type` of a `text_config`."""
