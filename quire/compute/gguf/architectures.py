"""What `general.architecture` of a GGUF file stands for, and which of its tensors is which weight.

The weights are those of a checkpoint in Hugging Face layout. Source: llama.cpp's docs and the `gguf` package's
constants.py and tensor_mapping.py."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.compute.gguf.header import GgufModel, GgufTensor
from quire.errors import CheckpointError

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_USUAL = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = {**_ATTENTION, **_MLP, **_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}


_BERT = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
}
_OUTSIDE_BERT = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
    "position_embd.weight": "embeddings.position_embeddings.weight",
    "token_types.weight": "embeddings.token_type_embeddings.weight",
    "token_embd_norm.weight": "embeddings.LayerNorm.weight",
    "token_embd_norm.bias": "embeddings.LayerNorm.bias",
}


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`.

    Attributes:
        name: The entry of `architectures` in config.json.
        modules: A checkpoint's names of the parts of a layer, by the file's names.
        rotates_pairs: Whether queries and keys are stored for rotations of neighbours.
        norms_less: What is subtracted from the weights of norms.
        experts: A checkpoint's name of a layer's experts; empty: the model has none.
        expert_names: A checkpoint's names of an expert's projections, by the file's names.
        layer: What the names of a layer's parts begin with, before its number.
        outside: A checkpoint's names of tensors outside layers, by the file's names.
    """

    name: str
    modules: Mapping[str, str]
    rotates_pairs: bool = False
    norms_less: float = 0.0
    experts: str = ""
    expert_names: Mapping[str, str] = field(default_factory=dict)
    layer: str = "model.layers"
    outside: Mapping[str, str] = field(default_factory=lambda: _OUTSIDE)


_EXPERTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_ROUTED = {**_USUAL, "ffn_gate_inp": "mlp.gate"}
_CORRECTED = {**_ROUTED, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_BEHIND_BOTH = {**_ATTENTION, **_MLP, **_BEHIND}
_HUNYUAN = {**_USUAL, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}


def _shared(module: str) -> dict[str, str]:
    return {f"ffn_{part}_shexp": f"{module}.{name}" for part, name in _EXPERTS.items()}


_MIXTRAL = Architecture(
    "MixtralForCausalLM",
    {**_USUAL, "ffn_gate_inp": "block_sparse_moe.gate"},
    rotates_pairs=True,
    experts="block_sparse_moe",
    expert_names={"gate": "w1", "up": "w3", "down": "w2"},
)
"""Mixtral, whose files give `llama` as their architecture."""
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", _USUAL, rotates_pairs=True),
    "qwen2": Architecture("Qwen2ForCausalLM", _USUAL),
    "qwen3": Architecture("Qwen3ForCausalLM", _USUAL),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        {**_ROUTED, **_shared("mlp.shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        experts="mlp",
        expert_names=_EXPERTS,
    ),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _ROUTED, experts="mlp", expert_names=_EXPERTS),
    "gemma": Architecture("GemmaForCausalLM", _USUAL, norms_less=1.0),
    "gemma2": Architecture("Gemma2ForCausalLM", _GEMMA, norms_less=1.0),
    "gemma3": Architecture("Gemma3ForCausalLM", _GEMMA, norms_less=1.0),
    "granite": Architecture("GraniteForCausalLM", _USUAL, rotates_pairs=True),
    "olmo": Architecture("OlmoForCausalLM", _USUAL, rotates_pairs=True),
    "olmo2": Architecture("Olmo2ForCausalLM", _BEHIND_BOTH),
    "olmoe": Architecture("OlmoeForCausalLM", _ROUTED, experts="mlp", expert_names=_EXPERTS),
    "exaone4": Architecture("Exaone4ForCausalLM", _BEHIND_BOTH),
    "arcee": Architecture("ArceeForCausalLM", _USUAL, rotates_pairs=True),
    "nemotron": Architecture("NemotronForCausalLM", _USUAL, norms_less=1.0),
    "stablelm": Architecture("StableLmForCausalLM", _USUAL),
    "starcoder2": Architecture("Starcoder2ForCausalLM", {**_USUAL, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "command-r": Architecture("CohereForCausalLM", _USUAL),
    "cohere2": Architecture("Cohere2ForCausalLM", _USUAL),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        {
            **_USUAL,
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        {**_CORRECTED, **_shared("mlp.shared_experts"), "post_attention_norm": "post_attention_layernorm"},
        experts="mlp",
        expert_names=_EXPERTS,
    ),
    "dots1": Architecture(
        "Dots1ForCausalLM", {**_CORRECTED, **_shared("mlp.shared_experts")}, experts="mlp", expert_names=_EXPERTS
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", _USUAL),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        {
            **_ROUTED,
            **_shared("mlp.shared_experts"),
            "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
        },
        experts="mlp",
        expert_names=_EXPERTS,
    ),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", _HUNYUAN),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1ForCausalLM",
        {**_HUNYUAN, **_shared("mlp.shared_mlp"), "ffn_gate_inp": "mlp.gate.wg"},
        experts="mlp",
        expert_names=_EXPERTS,
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM",
        {
            **_USUAL,
            "ffn_gate_inp": "block_sparse_moe.gate",
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
        },
        experts="block_sparse_moe",
        expert_names={"gate": "w1", "up": "w3", "down": "w2"},
    ),
    "seed_oss": Architecture(
        "SeedOssForCausalLM", {**_ATTENTION, **_MLP, "post_attention_norm": "post_attention_layernorm"}
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", _USUAL, rotates_pairs=True),
    "phi3": Architecture("Phi3ForCausalLM", {**_USUAL, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "bert": Architecture("BertModel", _BERT, layer="encoder.layer", outside=_OUTSIDE_BERT),
}


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a file's metadata name. Raises CheckpointError if the architecture is not served."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"The GGUF file has the architecture {name!r}, which is not supported: served are "
            f"{', '.join(ARCHITECTURES)}. Use the model's safetensors, if its architecture is served there."
        )
    if name == "llama" and metadata.get("llama.expert_count"):
        return _MIXTRAL
    return ARCHITECTURES[name]


def heads_of(metadata: Mapping[str, Any], part: str) -> int:
    """Return how many heads queries (`q`) or keys (`k`) have. Raises CheckpointError if the file has no such number, or
    different ones for layers."""
    key = f"{metadata.get('general.architecture')}.attention.head_count"
    value = metadata.get(key)
    if part == "k":
        value = metadata.get(f"{key}_kv", value)
    count = one_for_all(key, value)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise CheckpointError(f"The GGUF file's '{key}' is {value!r}, it must be a number of heads.")
    return count


def layers_that_predict(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what the names of tensors begin with that belong to layers behind the model's, which predict further
    tokens and are left out."""
    kind = metadata.get("general.architecture")
    layers, more = (metadata.get(f"{kind}.{key}", 0) for key in ("block_count", "nextn_predict_layers"))
    if not isinstance(layers, int) or not isinstance(more, int):
        return ()
    return tuple(f"blk.{number}." for number in range(max(layers - more, 0), layers))


def one_for_all(key: str, value: Any) -> Any:
    """Return a value that a file may give layer by layer. Raises CheckpointError if layers differ."""
    if not isinstance(value, list):
        return value
    if not value or any(each != value[0] for each in value):
        raise CheckpointError(f"The GGUF file's '{key}' differs by layer, which is not supported.")
    return value[0]


_IN_LAYER = re.compile(r"^blk\.(\d+)\.(.+)\.(weight|bias)$")
_OF_EXPERTS = re.compile(r"^ffn_(gate|up|down)_exps$")
_OF_ONE_EXPERT = re.compile(r"^ffn_(gate|up|down)\.(\d+)$")
_READ_FOR_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that model_config.py reads; some tools write the first one for each layer."""


@dataclass(frozen=True)
class WeightSource:
    """The source of a weight.

    Attributes:
        first_row: The weight's first row in a stack of experts.
        heads: How many heads the rows belong to, in each of which the two halves of a pair are neighbours, where the
            weight has all first halves first; 0: the rows are in the weight's order.
        less: What is subtracted from the weight: Gemma's norms are stored with 1 added.
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    first_row: int = 0
    heads: int = 0
    less: float = 0.0


def weight_sources(model: GgufModel) -> dict[str, WeightSource]:
    """Return every weight by its name in a checkpoint; other tensors keep their names, which no model reads. Raises
    CheckpointError if the architecture is not served."""
    return dict(_sources(model, architecture_of(model.metadata)))


def _sources(model: GgufModel, architecture: Architecture) -> Iterator[tuple[str, WeightSource]]:
    heads = {part: heads_of(model.metadata, part) for part in ("q", "k")} if architecture.rotates_pairs else {}
    predicting = layers_that_predict(model.metadata)
    for name, tensor in model.tensors.items():
        if name.endswith(_READ_FOR_CONFIG) or name.startswith(predicting):
            continue
        found = _IN_LAYER.match(name)
        if found is None:
            less = architecture.norms_less if name.endswith("norm.weight") else 0.0
            yield architecture.outside.get(name, name), WeightSource(tensor, tensor.shape, less=less)
            continue
        layer, part, kind = f"{architecture.layer}.{found[1]}", found[2], found[3]
        if (stack := _OF_EXPERTS.match(part)) and architecture.experts and len(tensor.shape) == 3:
            yield from _experts(f"{layer}.{architecture.experts}", architecture.expert_names[stack[1]], tensor)
        elif (one := _OF_ONE_EXPERT.match(part)) and architecture.experts:
            module = f"{layer}.{architecture.experts}.experts.{one[2]}.{architecture.expert_names[one[1]]}"
            yield f"{module}.{kind}", WeightSource(tensor, tensor.shape)
        else:
            known, whole = (architecture.modules.get(each) for each in (part, f"{part}.{kind}"))
            theirs = name if known is None else f"{layer}.{known}.{kind}"
            theirs = theirs if whole is None else f"{layer}.{whole}"
            less = architecture.norms_less if part.endswith("norm") and kind == "weight" else 0.0
            rotated = heads.get(part.removeprefix("attn_"), 0) if part.startswith("attn_") else 0
            shape = (1, *tensor.shape) if part == "ffn_gate_inp_shexp" and len(tensor.shape) == 1 else tensor.shape
            yield theirs, WeightSource(tensor, shape, heads=rotated, less=less)


def _experts(module: str, projection: str, tensor: GgufTensor) -> Iterator[tuple[str, WeightSource]]:
    count, rows, columns = tensor.shape
    for number in range(count):
        name = f"{module}.experts.{number}.{projection}.weight"
        yield name, WeightSource(tensor, (rows, columns), first_row=number * rows)
