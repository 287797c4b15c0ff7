"""Writes trained models in the Hugging Face layout (config.json, bf16 safetensors in shards, and their index), an
EAGLE-3 head in the layout of published ones, and reads a model again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from quill.chat import END, END_OF_TEXT
from quill.eagle3 import Head
from quill.model import Llama, Shape
from quill.tokenizer import CONTEXT, save_tokenizer, special_id

SHARD_BYTES = 14 * 10**6


def save_model(model: Llama, tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, directory)
    _write_json(directory / "config.json", _config(model, tokenizer))
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()
    }
    _save_tensors(tensors, directory)


def load_model(directory: Path) -> tuple[Llama, Tokenizer]:
    """A model that `save_model` has written, in fp32, and its tokenizer."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    model = Llama(Shape(**{field.name: config[field.name] for field in fields(Shape)}))
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model, Tokenizer.from_file(str(directory / "tokenizer.json"))


def save_head(head: Head, directory: Path) -> None:
    """An EAGLE-3 head as vLLM and SGLang read it. It has no embeddings: they are the model's."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _head_config(head))
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in head.state_dict().items()
    }
    _save_tensors(tensors, directory)


def _save_tensors(tensors: dict[str, Tensor], directory: Path) -> None:
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


def _head_config(head: Head) -> dict[str, object]:
    """The streams are named twice: vLLM counts the layers that they enter, SGLang those that they leave."""
    sources = head.shape.sources
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **asdict(head.shape.layer),
        "draft_vocab_size": head.shape.draft_vocab_size,
        "target_hidden_size": head.shape.layer.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(sources),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in sources],
            "use_aux_hidden_state": True,
        },
        "norm_before_residual": False,
        "max_position_embeddings": CONTEXT,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
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
