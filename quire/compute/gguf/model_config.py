"""The metadata of a GGUF file as the config.json that the same model has in Hugging Face layout.

Values are passed on unchanged, because the reader of config.json checks them. Source of the keys: the `gguf` package's
constants.py, and llama.cpp for what a file does not say.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from quire.compute.gguf.architectures import architecture_of, heads_of, layers_that_predict, one_for_all
from quire.compute.gguf.header import GgufModel, GgufTensor
from quire.compute.gguf.tensor_types import QuantizedType
from quire.errors import CheckpointError

_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the models that scale attention by the stream's width over the heads; llama.cpp knows them so too."""
_HEAD = "output.weight"
_SOFTMAX, _SIGMOID = 1, 2
"""How logits become scores of experts, by the format's numbers."""
_SCORED_BY_SIGMOID = ("glm4moe", "dots1", "minimax-m2")
_NULL = {("exaone4", "sliding_window")}
"""Keys of an architecture whose absence means another value than null."""
_MAX_FACTORS = 1 << 14
_SIZES = (
    "embedding_length",
    "feed_forward_length",
    "attention.key_length",
    "expert_count",
    "expert_feed_forward_length",
    "heads",
    "kv_heads",
)
Keys = Mapping[str, Any]


def model_config(model: GgufModel) -> dict[str, Any]:
    """Return the model's config.json. Raises CheckpointError if the model is not served, or its files lack what every
    file has."""
    metadata = model.metadata
    architecture = architecture_of(metadata)
    kind = str(metadata["general.architecture"])
    own = {key.removeprefix(f"{kind}."): value for key, value in metadata.items() if key.startswith(f"{kind}.")}
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{model.paths[0]} has no token_embd.weight, so it is no language model.")
    heads, kv_heads = heads_of(metadata, "q"), heads_of(metadata, "k")
    _check_sizes(model, {**own, "heads": heads, "kv_heads": kv_heads})
    tied, types = is_tied(model), dict(Counter(tensor.form.name for tensor in model.tensors.values()))
    config = {
        "architectures": [architecture.name],
        "hidden_size": own.get("embedding_length"),
        "intermediate_size": one_for_all("feed_forward_length", own.get("feed_forward_length")),
        "num_hidden_layers": _layers(model, own),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": own.get("attention.key_length"),
        "max_position_embeddings": own.get("context_length"),
        "rms_norm_eps": own.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": own.get("rope.freq_base", 10000.0),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": tied,
        "attention_bias": "blk.0.attn_q.bias" in model.tensors and kind not in ("qwen2", "qwen2moe"),
        "attention_out_bias": "blk.0.attn_output.bias" in model.tensors if kind == "seed_oss" else None,
        "mlp_bias": "blk.0.ffn_down.bias" in model.tensors,
        "qk_norm": "blk.0.attn_q_norm.weight" in model.tensors,
        "dtype": _dtype(model),
        "quantization_config": {"quant_method": "gguf", "types": types, **_sizes(model, tied)},
    }
    _check_experts(own, kind, "ffn_up_shexp" in architecture.modules)
    config |= _rope(model, own) | _experts(own)
    config |= _EXTRAS[kind](own, config) if kind in _EXTRAS else {}
    if kind == "bert":
        types_of_tokens = model.tensors.get("token_types.weight")
        config["type_vocab_size"] = 0 if types_of_tokens is None else types_of_tokens.rows
    config.pop("qk_norm")
    config |= {key: metadata.get(f"tokenizer.ggml.{key}") for key in ("bos_token_id", "eos_token_id")}
    return {key: value for key, value in config.items() if value is not None or (kind, key) in _NULL}


def _layers(model: GgufModel, own: Keys) -> Any:
    count, left_out = own.get("block_count"), len(layers_that_predict(model.metadata))
    return count - left_out if isinstance(count, int) else count


def is_tied(model: GgufModel) -> bool:
    """Whether the head is the embedding: the model has no head of its own, or one with the same bytes."""
    head, embedding = model.tensors.get(_HEAD), model.tensors["token_embd.weight"]
    return head is None or head.equals(embedding)


def _check_sizes(model: GgufModel, own: Keys) -> None:
    """Refuse sizes larger than those of the tensors, so that nothing is built that they cannot fill."""
    largest = max(max(tensor.shape) for tensor in model.tensors.values())
    limits = dict.fromkeys(_SIZES, largest) | {"block_count": len(model.tensors)}
    for key, limit in limits.items():
        value = one_for_all(key, own.get(key))
        if _is_number(value) and value > limit:
            raise CheckpointError(f"The GGUF file's {key} is {value}, its tensors are smaller: download it again.")


def _sizes(model: GgufModel, tied: bool) -> dict[str, int]:
    """Return how many weights a processor keeps dense and how many bytes quantized, and the same for a GPU.

    A GPU's embeddings are all dense; a processor's are where they are not tied, because they are only looked up.
    """
    dense = packed = gpu_dense = coded = 0
    predicting = layers_that_predict(model.metadata)
    for name, tensor in model.tensors.items():
        if (tied and name == _HEAD) or name.startswith(predicting):
            continue
        size = tensor.rows * tensor.shape[-1]
        if isinstance(tensor.form, QuantizedType) and name != "token_embd.weight":
            coded += tensor.form.coded_bytes(tensor.rows, tensor.shape[-1])
        else:
            gpu_dense += size
        if isinstance(tensor.form, QuantizedType) and (tied or name != "token_embd.weight"):
            packed += tensor.form.packed_bytes(tensor.rows, tensor.shape[-1])
        else:
            dense += size
    return {"dense": dense, "packed": packed, "gpu_dense": gpu_dense, "coded": coded}


def _dtype(model: GgufModel) -> str:
    """Return the one dtype of all weights, otherwise bfloat16, in which activations of quantized weights are
    computed."""
    types = {tensor.form.name for tensor in model.tensors.values() if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(types), "bfloat16")


def _rope(model: GgufModel, own: Keys) -> dict[str, Any]:
    """Return `rope_scaling`, as older config.json files have it, and which part of a head is rotated."""
    original = own.get("rope.scaling.original_context_length")
    found: dict[str, Any] = {}
    scaling = own.get("rope.scaling.type", "none")
    if scaling == "linear" or (scaling == "none" and _is_number(own.get("rope.scale_linear"))):
        found = {"rope_type": "linear", "factor": own.get("rope.scaling.factor", own.get("rope.scale_linear"))}
    elif scaling == "yarn":
        found = {
            "rope_type": "yarn",
            "factor": own.get("rope.scaling.factor"),
            "original_max_position_embeddings": original,
            "beta_fast": own.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": own.get("rope.scaling.yarn_beta_slow"),
        }
    elif scaling not in ("none", "longrope"):
        raise CheckpointError(f"The GGUF file's rope.scaling.type is {scaling!r}, which is not supported.")
    factors = {name: _factors(model, f"rope_{name}.weight") for name in ("freqs", "factors_long", "factors_short")}
    if factors["freqs"]:
        if found:
            raise CheckpointError("The GGUF file has rope_freqs beside rope.scaling.type, which is not supported.")
        found = {"rope_type": "factors", "factors": factors["freqs"]}
    elif factors["factors_long"] and factors["factors_short"]:
        found = {
            "rope_type": "longrope",
            "long_factor": factors["factors_long"],
            "short_factor": factors["factors_short"],
            "original_max_position_embeddings": original,
            "attention_factor": own.get("rope.scaling.attn_factor"),
        }
    elif scaling == "longrope":
        raise CheckpointError("The GGUF file has longrope without rope_factors_long.weight: download it again.")
    return {
        "rope_scaling": {key: value for key, value in found.items() if value is not None} or None,
        "partial_rotary_factor": _turning_share(model, own),
    }


def _turning_share(model: GgufModel, own: Keys) -> float | None:
    width: Any = own.get("attention.key_length")
    turning: Any = own.get("rope.dimension_count")
    if width is None and _is_number(own.get("embedding_length")):
        width = own["embedding_length"] // heads_of(model.metadata, "q")
    if not _is_number(width) or not _is_number(turning) or turning >= width:
        return None
    return float(turning / width)


def _factors(model: GgufModel, name: str) -> list[float]:
    """Return the values of a small fp32 tensor, which may stand in every layer."""
    tensor: GgufTensor | None = model.tensors.get(name, model.tensors.get(f"blk.0.{name}"))
    if tensor is None:
        return []
    for other, each in model.tensors.items():
        if other.endswith(name) and not each.equals(tensor):
            raise CheckpointError(f"{tensor.path}: '{other}' differs from other layers', which is not supported.")
    if tensor.form.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_FACTORS:
        raise CheckpointError(f"{tensor.path}: '{name}' is no row of F32: download it again.")
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.nbytes)))


def _check_experts(own: Keys, kind: str, may_share: bool) -> None:
    """Refuse experts that the architecture does not have."""
    if not may_share and (own.get("expert_shared_count") or own.get("expert_shared_feed_forward_length")):
        raise CheckpointError("The GGUF file has shared experts, which are not supported.")
    scoring, usual = own.get("expert_gating_func"), _SIGMOID if kind in _SCORED_BY_SIGMOID else _SOFTMAX
    if scoring not in (None, 0, usual):
        raise CheckpointError(
            f"The GGUF file's expert_gating_func is {scoring!r}, which is not supported for {kind}: served is {usual}."
        )


def _experts(own: Keys) -> dict[str, Any]:
    if not own.get("expert_count"):
        return {}
    width = own.get("expert_feed_forward_length", own.get("feed_forward_length"))
    return {
        "num_experts": own.get("expert_count"),
        "num_experts_per_tok": own.get("expert_used_count"),
        "moe_intermediate_size": one_for_all("expert_feed_forward_length", width),
        "norm_topk_prob": own.get("expert_weights_norm", True),
    }


def _like_deepseek(own: Keys, config: Keys) -> dict[str, Any]:
    """Return the experts of GLM-4.5 and dots.llm1, whose keys are DeepSeek's."""
    return {
        "num_experts": None,
        "n_routed_experts": own.get("expert_count"),
        "n_shared_experts": own.get("expert_shared_count"),
        "first_k_dense_replace": own.get("leading_dense_block_count"),
        "routed_scaling_factor": own.get("expert_weights_scale"),
        "norm_topk_prob": own.get("expert_weights_norm"),
        "n_group": own.get("expert_group_count"),
        "topk_group": own.get("expert_group_used_count"),
    }


def _glm4moe(own: Keys, config: Keys) -> dict[str, Any]:
    return _like_deepseek(own, config) | {"use_qk_norm": config["qk_norm"], "num_nextn_predict_layers": 0}


def _dots1(own: Keys, config: Keys) -> dict[str, Any]:
    return _like_deepseek(own, config) | {"use_sliding_window": False}


def _softmax_experts(own: Keys, config: Keys) -> dict[str, Any]:
    """Return what Qwen2-MoE and OLMoE have; llama.cpp never scales their weights to the sum 1."""
    width = own.get("expert_shared_feed_forward_length")
    return {"norm_topk_prob": own.get("expert_weights_norm", False), "shared_expert_intermediate_size": width}


def _ernie(own: Keys, config: Keys) -> dict[str, Any]:
    return {"attention_bias": None, "mlp_bias": None, "use_bias": config["attention_bias"]}


def _ernie_moe(own: Keys, config: Keys) -> dict[str, Any]:
    return _ernie(own, config) | {
        "num_experts": None,
        "num_experts_per_tok": None,
        "norm_topk_prob": None,
        "moe_num_experts": own.get("expert_count"),
        "moe_k": own.get("expert_used_count"),
        "moe_num_shared_experts": own.get("expert_shared_count"),
        "moe_layer_start_index": own.get("leading_dense_block_count"),
        "moe_layer_interval": own.get("interleave_moe_layer_step"),
    }


def _hunyuan_moe(own: Keys, config: Keys) -> dict[str, Any]:
    """Return what Hunyuan-A13B has: all experts, and the shared one, are as wide as `intermediate_size`."""
    return {
        "intermediate_size": config.get("moe_intermediate_size", config["intermediate_size"]),
        "moe_topk": own.get("expert_used_count"),
        **dict.fromkeys(("moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob")),
    }


def _minimax_m2(own: Keys, config: Keys) -> dict[str, Any]:
    return {
        "num_experts": None,
        "norm_topk_prob": None,
        "moe_intermediate_size": None,
        "num_local_experts": own.get("expert_count"),
        "intermediate_size": config.get("moe_intermediate_size", config["intermediate_size"]),
        "rotary_dim": own.get("rope.dimension_count"),
        "partial_rotary_factor": None,
    }


def _cohere(own: Keys, config: Keys) -> dict[str, Any]:
    return {
        "layer_norm_eps": own.get("attention.layer_norm_epsilon"),
        "logit_scale": own.get("logit_scale"),
        "use_qk_norm": config["qk_norm"] or None,
    }


def _cohere2(own: Keys, config: Keys) -> dict[str, Any]:
    return _cohere(own, config) | {"sliding_window": own.get("attention.sliding_window")} | _layer_types(own)


def _exaone4(own: Keys, config: Keys) -> dict[str, Any]:
    window, layers = own.get("attention.sliding_window"), config["num_hidden_layers"]
    whole = window is None and isinstance(layers, int)
    return {"sliding_window": window} | ({"layer_types": ["full_attention"] * layers} if whole else _layer_types(own))


def _layer_types(own: Keys) -> dict[str, Any]:
    """Return which layers have a window; without a pattern, the family says it."""
    pattern = own.get("attention.sliding_window_pattern")
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        return {"sliding_window_pattern": pattern}
    if isinstance(pattern, list):
        return {"layer_types": ["sliding_attention" if each else "full_attention" for each in pattern]}
    return {}


def _nemotron(own: Keys, config: Keys) -> dict[str, Any]:
    return {"norm_eps": own.get("attention.layer_norm_epsilon")}


def _starcoder2(own: Keys, config: Keys) -> dict[str, Any]:
    return {
        "norm_epsilon": own.get("attention.layer_norm_epsilon"),
        "use_bias": config["attention_bias"],
        "attention_bias": None,
        "mlp_bias": None,
    }


def _stablelm(own: Keys, config: Keys) -> dict[str, Any]:
    if config["qk_norm"]:
        raise CheckpointError("The GGUF file has norms of heads, which are not supported: use the model's safetensors.")
    return {
        "layer_norm_eps": own.get("attention.layer_norm_epsilon"),
        "use_parallel_residual": own.get("use_parallel_residual", False),
        "use_qkv_bias": config["attention_bias"],
        "attention_bias": None,
        "partial_rotary_factor": config.get("partial_rotary_factor") or 1.0,
    }


def _olmo(own: Keys, config: Keys) -> dict[str, Any]:
    return {"clip_qkv": own.get("attention.clamp_kqv")}


def _gemma(own: Keys, config: Keys, layers_of_27b: int) -> dict[str, Any]:
    width = config["head_dim"]
    if config["num_hidden_layers"] == layers_of_27b and _is_number(config["hidden_size"]):
        width = config["hidden_size"] // config["num_attention_heads"]
    return {
        "query_pre_attn_scalar": width,
        "sliding_window": own.get("attention.sliding_window"),
        "attn_logit_softcapping": own.get("attn_logit_softcapping"),
        "final_logit_softcapping": own.get("final_logit_softcapping"),
    }


def _gemma3(own: Keys, config: Keys) -> dict[str, Any]:
    extras = _gemma(own, config, _LAYERS_OF_27B["gemma3"])
    extras |= {"rope_local_base_freq": own.get("rope.freq_base_swa", 10000.0)}
    return extras | _layer_types(own)


def _phi3(own: Keys, config: Keys) -> dict[str, Any]:
    return {
        "sliding_window": own.get("attention.sliding_window"),
        "original_max_position_embeddings": own.get("rope.scaling.original_context_length"),
    }


def _granite(own: Keys, config: Keys) -> dict[str, Any]:
    return {
        "attention_multiplier": own.get("attention.scale"),
        "embedding_multiplier": own.get("embedding_scale"),
        "residual_multiplier": own.get("residual_scale"),
        "logits_scaling": own.get("logit_scale"),
    }


def _olmo2(own: Keys, config: Keys) -> dict[str, Any]:
    if own.get("attention.sliding_window"):
        raise CheckpointError(
            "The GGUF file has windows, as OLMo 3's have, which are not supported: use the model's safetensors."
        )
    return {}


def _bert(own: Keys, config: Keys) -> dict[str, Any]:
    return {"layer_norm_eps": own.get("attention.layer_norm_epsilon"), "hidden_act": "gelu"}


_EXTRAS: dict[str, Callable[[Keys, Keys], dict[str, Any]]] = {
    "gemma2": partial(_gemma, layers_of_27b=_LAYERS_OF_27B["gemma2"]),
    "gemma3": _gemma3,
    "granite": _granite,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmoe": _softmax_experts,
    "qwen2moe": _softmax_experts,
    "exaone4": _exaone4,
    "nemotron": _nemotron,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "command-r": _cohere,
    "cohere2": _cohere2,
    "glm4moe": _glm4moe,
    "dots1": _dots1,
    "ernie4_5": _ernie,
    "ernie4_5-moe": _ernie_moe,
    "hunyuan-moe": _hunyuan_moe,
    "minimax-m2": _minimax_m2,
    "phi3": _phi3,
    "bert": _bert,
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
