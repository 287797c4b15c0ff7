"""GGUF files made in a test from a checkpoint of `tests.checkpoints`, by the `gguf` package: its writer, its names of
tensors, its quantizers, and its dequantizers as the reference.

The types that the package cannot quantize get random bits with scales that make weights of a usual size; the dense
checkpoint is written anew with what the bits stand for, so that transformers computes with the same weights.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file

from tests.checkpoints import edit_config

Array = npt.NDArray[Any]
QUANTIZED = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where in a block fp16 scales lie."""
_ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", gguf.MODEL_ARCH.LLAMA),
    "MistralForCausalLM": ("llama", gguf.MODEL_ARCH.LLAMA),
    "MixtralForCausalLM": ("llama", gguf.MODEL_ARCH.LLAMA),
    "Qwen2ForCausalLM": ("qwen2", gguf.MODEL_ARCH.QWEN2),
    "Qwen3ForCausalLM": ("qwen3", gguf.MODEL_ARCH.QWEN3),
    "Qwen3MoeForCausalLM": ("qwen3moe", gguf.MODEL_ARCH.QWEN3MOE),
    "Phi3ForCausalLM": ("phi3", gguf.MODEL_ARCH.PHI3),
    "GemmaForCausalLM": ("gemma", gguf.MODEL_ARCH.GEMMA),
    "GraniteForCausalLM": ("granite", gguf.MODEL_ARCH.GRANITE),
    "Olmo2ForCausalLM": ("olmo2", gguf.MODEL_ARCH.OLMO2),
    "SeedOssForCausalLM": ("seed_oss", gguf.MODEL_ARCH.SEED_OSS),
    "SmolLM3ForCausalLM": ("smollm3", gguf.MODEL_ARCH.SMOLLM3),
    "Gemma2ForCausalLM": ("gemma2", gguf.MODEL_ARCH.GEMMA2),
    "Gemma3ForCausalLM": ("gemma3", gguf.MODEL_ARCH.GEMMA3),
    "BertModel": ("bert", gguf.MODEL_ARCH.BERT),
    "Qwen2MoeForCausalLM": ("qwen2moe", gguf.MODEL_ARCH.QWEN2MOE),
    "OlmoForCausalLM": ("olmo", gguf.MODEL_ARCH.OLMO),
    "OlmoeForCausalLM": ("olmoe", gguf.MODEL_ARCH.OLMOE),
    "Exaone4ForCausalLM": ("exaone4", gguf.MODEL_ARCH.EXAONE4),
    "ArceeForCausalLM": ("arcee", gguf.MODEL_ARCH.ARCEE),
    "NemotronForCausalLM": ("nemotron", gguf.MODEL_ARCH.NEMOTRON),
    "StableLmForCausalLM": ("stablelm", gguf.MODEL_ARCH.STABLELM),
    "Starcoder2ForCausalLM": ("starcoder2", gguf.MODEL_ARCH.STARCODER2),
    "CohereForCausalLM": ("command-r", gguf.MODEL_ARCH.COMMAND_R),
    "Cohere2ForCausalLM": ("cohere2", gguf.MODEL_ARCH.COHERE2),
    "Glm4ForCausalLM": ("glm4", gguf.MODEL_ARCH.GLM4),
    "Glm4MoeForCausalLM": ("glm4moe", gguf.MODEL_ARCH.GLM4_MOE),
    "Dots1ForCausalLM": ("dots1", gguf.MODEL_ARCH.DOTS1),
    "Ernie4_5ForCausalLM": ("ernie4_5", gguf.MODEL_ARCH.ERNIE4_5),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5-moe", gguf.MODEL_ARCH.ERNIE4_5_MOE),
    "HunYuanDenseV1ForCausalLM": ("hunyuan-dense", gguf.MODEL_ARCH.HUNYUAN_DENSE),
    "HunYuanMoEV1ForCausalLM": ("hunyuan-moe", gguf.MODEL_ARCH.HUNYUAN_MOE),
    "MiniMaxM2ForCausalLM": ("minimax-m2", gguf.MODEL_ARCH.MINIMAXM2),
}
_SAME = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "clip_qkv": "attention.clamp_kqv",
    "use_parallel_residual": "use_parallel_residual",
    "n_routed_experts": "expert_count",
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_topk": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
"""Keys of config.json → of the metadata."""
_ROTATED = ("Arcee", "Granite", "Llama", "Mistral", "Mixtral", "Olmo", "SmolLM3")
"""Models whose pairs llama.cpp's converter moves."""
_EXPERT = re.compile(r"^(model\.layers\.\d+\.(?:mlp|block_sparse_moe)\.experts)\.(\d+)\.(\w+)\.weight$")


def random_blocks(name: str, rows: int, columns: int, seed: int = 0, std: float = 0.2) -> Array:
    """[rows, bytes] uint8: random bits of this type, whose weights have about this spread."""
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    _set_scales(blocks, name, np.ones(len(blocks)))
    spread = float(dequantize(blocks, kind).std())
    _set_scales(blocks, name, generator.uniform(0.5, 1.5, len(blocks)) * std / spread)
    return blocks.reshape(rows, -1)


def _set_scales(blocks: Array, name: str, scales: Array) -> None:
    for at in _HALVES[name]:
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)


def values(blocks: Array, name: str) -> Array:
    """What blocks stand for, fp32, by the gguf package."""
    return dequantize(blocks, gguf.GGMLQuantizationType[name]).astype(np.float32)


def make_gguf(
    checkpoint: Path,
    path: Path,
    types: dict[str, str] | str = "F32",
    *,
    metadata: dict[str, Any] | None = None,
    random: bool = True,
    extra: dict[str, Array] | None = None,
) -> Path:
    """Write a checkpoint as a GGUF file, and the checkpoint anew with the weights that are in it.

    Args:
        checkpoint: A directory in Hugging Face layout.
        path: Of the file.
        types: Of matrices, by a part of their names in the checkpoint; `""` for all others; or one for all. A matrix
            whose rows are no whole blocks, and vectors, are F32.
        metadata: More of it; None as a value leaves a key out.
        random: Quantized tensors get random bits; otherwise the package's quantizer makes them.
        extra: Tensors beside the checkpoint's, in place of the factors that its config.json asks for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text())
    name, kind = _ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, name)
    _add_metadata(writer, {**_described(config, name), **_vocabulary(checkpoint), **(metadata or {})})
    mapping = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    dense: dict[str, Array] = {}
    stacks: dict[str, dict[int, tuple[Array, str]]] = {}
    for weight, value in sorted(_tensors(checkpoint).items()):
        stored, form, dense[weight] = _encoded(weight, value, _type_of(weight, value, types), config, random)
        if single := _EXPERT.match(weight):
            stack = f"{single[1]}.{ {'w1': 'gate_proj', 'w3': 'up_proj', 'w2': 'down_proj'}.get(single[3], single[3]) }"
            stacks.setdefault(stack.replace("block_sparse_moe", "mlp"), {})[int(single[2])] = stored, form
        else:
            known = weight.replace("e_score_correction_bias", "e_score_correction.bias")
            stored = stored.reshape(-1) if known != weight else stored
            target = mapping.get_name(known, try_suffixes=(".weight", ".bias"))
            assert target is not None, weight
            writer.add_tensor(target, stored, raw_dtype=gguf.GGMLQuantizationType[form])
    for stack, experts in stacks.items():
        target = mapping.get_name(stack)
        assert target is not None, stack
        together = np.stack([experts[number][0] for number in sorted(experts)])
        writer.add_tensor(f"{target}.weight", together, raw_dtype=gguf.GGMLQuantizationType[experts[0][1]])
    for added, values_of_it in (_factors(config) if extra is None else extra).items():
        writer.add_tensor(added, values_of_it)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for file in checkpoint.glob("model*.safetensors*"):
        file.unlink()
    save_file(dense, checkpoint / "model.safetensors", {"format": "pt"})
    edit_config(checkpoint, {"dtype": "float32"})
    return path


def _tensors(checkpoint: Path) -> dict[str, Array]:
    import torch
    from safetensors.torch import load_file as load_torch

    found: dict[str, Array] = {}
    for file in checkpoint.glob("*.safetensors"):
        for name, tensor in load_torch(file).items():
            found |= _unstacked(name, tensor.to(torch.float32).numpy())
    return found


def _unstacked(name: str, value: Array) -> dict[str, Array]:
    """transformers 5 stacks experts."""
    if name.endswith("experts.gate_up_proj"):
        module, half = name.removesuffix("gate_up_proj"), value.shape[1] // 2
        gates = {f"{module}{i}.gate_proj.weight": each[:half] for i, each in enumerate(value)}
        return gates | {f"{module}{i}.up_proj.weight": each[half:] for i, each in enumerate(value)}
    if name.endswith("experts.down_proj"):
        module = name.removesuffix("down_proj")
        return {f"{module}{i}.down_proj.weight": each for i, each in enumerate(value)}
    return {name: np.ascontiguousarray(value)}


def _type_of(name: str, value: Array, types: dict[str, str] | str) -> str:
    rules = {"": types} if isinstance(types, str) else types
    if value.ndim < 2 or name.endswith((".gate.weight", ".gate.wg.weight", "_correction_bias", "_gate.weight")):
        return "F32"
    form = next(rules[part] for part in sorted(rules, key=len, reverse=True) if part in name)
    return form if value.shape[1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form]][0] == 0 else "F32"


def _encoded(name: str, value: Array, form: str, config: dict[str, Any], random: bool) -> tuple[Array, str, Array]:
    """The tensor as the file has it, its type, and the weight that this is."""
    if form == "F32":
        less = (
            1.0
            if config["architectures"][0].startswith(("Gemma", "Nemotron")) and name.endswith("norm.weight")
            else 0.0
        )
        return _rotated(name, value + np.float32(less), config), form, value
    kind = gguf.GGMLQuantizationType[form]
    if form in QUANTIZED and random:
        stored = random_blocks(form, *value.shape, seed=sum(name.encode()))
    else:
        stored = quantize(_rotated(name, value, config), kind)
    known = dequantize(stored, kind).astype(np.float32)
    return stored, form, _turned_back(name, known, config)


def _rotated(name: str, value: Array, config: dict[str, Any]) -> Array:
    """As llama.cpp's converter does it: pairs that turn together stand side by side."""
    heads = _heads(name, config)
    if not heads:
        return value
    return value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def _turned_back(name: str, value: Array, config: dict[str, Any]) -> Array:
    heads = _heads(name, config)
    if not heads:
        return value
    pairs = value.reshape(heads, value.shape[0] // heads // 2, 2, *value.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(value.shape))


def _heads(name: str, config: dict[str, Any]) -> int:
    if config["architectures"][0].removesuffix("ForCausalLM") not in _ROTATED:
        return 0
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    return next((int(config[key]) for part, key in heads.items() if f".{part}." in name), 0)


def _described(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = {f"{name}.{theirs}": config[ours] for ours, theirs in _SAME.items() if config.get(ours) is not None}
    heads = config["num_attention_heads"]
    found.setdefault(f"{name}.attention.key_length", config["hidden_size"] // heads)
    found[f"{name}.attention.value_length"] = found[f"{name}.attention.key_length"]
    rope = config.get("rope_parameters") or {}
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    found[f"{name}.rope.freq_base"] = float(rope.get("rope_theta", 10000.0))
    if local:
        found[f"{name}.rope.freq_base_swa"] = float(local["rope_theta"])
    width = found[f"{name}.attention.key_length"]
    found[f"{name}.rope.dimension_count"] = int(width * rope.get("partial_rotary_factor", 1.0))
    if rope.get("rope_type") in ("linear", "yarn"):
        found[f"{name}.rope.scaling.type"] = rope["rope_type"]
        found[f"{name}.rope.scaling.factor"] = float(rope["factor"])
    if original := rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings")):
        found[f"{name}.rope.scaling.original_context_length"] = original
    if "layer_types" in config and name in ("gemma3", "exaone4", "cohere2"):
        found[f"{name}.attention.sliding_window_pattern"] = [k == "sliding_attention" for k in config["layer_types"]]
    return found


def _factors(config: dict[str, Any]) -> dict[str, Array]:
    """The tensors of rotary factors that converters write."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], dtype=np.float32)
            for kind in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = rope["rope_theta"] ** (-np.arange(0, width, 2) / width)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / (keep + (1 - keep) / rope["factor"])).astype(np.float32)}


def _vocabulary(checkpoint: Path) -> dict[str, Any]:
    """A byte-level tokenizer.json as metadata, if the checkpoint has one."""
    file = checkpoint / "tokenizer.json"
    if not file.exists():
        return {"tokenizer.ggml.model": "no_vocab"}
    described = json.loads(file.read_text())
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    ids: dict[str, int] = dict(described["model"]["vocab"])
    special = {token["content"]: token["special"] for token in described["added_tokens"]}
    ids |= {token["content"]: token["id"] for token in described["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    template = checkpoint / "chat_template.jinja"
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [{None: 1, True: 3, False: 4}[special.get(token)] for token in tokens],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in described["model"]["merges"]],
        "tokenizer.chat_template": template.read_text() if template.exists() else settings.get("chat_template"),
    }
    for theirs, ours in {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token"}.items():
        if settings.get(ours) in ids:
            found[f"tokenizer.ggml.{theirs}_token_id"] = ids[settings[ours]]
    return found


def _add_metadata(writer: gguf.GGUFWriter, metadata: dict[str, Any]) -> None:
    for key, value in metadata.items():
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
