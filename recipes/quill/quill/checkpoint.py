"""Writes a trained model in the Hugging Face layout: config.json, bf16 safetensors in shards, and their index."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from quill.chat import END, END_OF_TEXT
from quill.model import Llama
from quill.tokenizer import CONTEXT, save_tokenizer, special_id

SHARD_BYTES = 14 * 10**6


def save_model(model: Llama, tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, directory)
    _write_json(directory / "config.json", _config(model, tokenizer))
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()
    }
    shards = _shards(tensors)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def _config(model: Llama, tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(model.shape),
        "max_position_embeddings": CONTEXT,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": special_id(tokenizer, END),
        "pad_token_id": special_id(tokenizer, END_OF_TEXT),
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }


def _shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
