"""Checkpoints of architectures that transformers has no class of, made from those of a class that computes the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import TINY, edit_config, make_tiny

_INTERNLM2 = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
_EXAONE = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "model.layers": "transformer.h",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.attention.out_proj",
    "self_attn": "attn.attention",
    "mlp.gate_proj": "mlp.c_fc_0",
    "mlp.up_proj": "mlp.c_fc_1",
    "mlp.down_proj": "mlp.c_proj",
}


def make_renamed(directory: Path, architecture: str, like: str, shape: Mapping[str, Any]) -> tuple[Path, Path]:
    """The checkpoint, and that of the class `like` which has the same logits."""
    whole = {"text_config": TINY | shape, "vision_config": _TOWER} if "Conditional" in like else shape
    reference = make_tiny(directory / "like", like, **whole)
    own = directory / "own"
    own.mkdir()
    tensors = load_file(reference / "model.safetensors")
    save_file(_TENSORS.get(architecture, dict)(tensors), own / "model.safetensors")
    (own / "config.json").write_text((reference / "config.json").read_text())
    edit_config(own, _CONFIG.get(architecture, {}))
    edit_config(own, {"architectures": [architecture], "model_type": architecture.lower()})
    return own, reference


def _with_names(tensors: dict[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


def _internlm2(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each KV head's queries, key and value lie side by side."""
    fused = dict(tensors)
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        q, k, v = (fused.pop(name.replace("q_proj", f"{each}_proj")) for each in "qkv")
        groups = (part.view(2, -1, part.shape[-1]) for part in (q, k, v))  # SHAPE has two KV heads
        fused[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat([*groups], dim=1).flatten(0, 1)
    return _with_names(fused, _INTERNLM2)


_TENSORS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "InternLM2ForCausalLM": _internlm2,
    "Step3p5ForCausalLM": lambda tensors: {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in tensors.items()
        if not name.startswith(("vision_model.", "vit_large_projector."))
    },
    "ExaoneForCausalLM": lambda tensors: _with_names(tensors, _EXAONE),
}


def _text_alone(config: dict[str, Any]) -> None:
    config.update(config.pop("text_config"))
    del config["vision_config"]


_TOWER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56, "mlp_ratio": 1.0}
_CONFIG: dict[str, dict[str, Any] | Callable[[dict[str, Any]], None]] = {
    "Step3p5ForCausalLM": _text_alone,
    "InternLM2ForCausalLM": {"bias": False},
    "InternLM3ForCausalLM": {"bias": False, "qkv_bias": True},
    "ExaoneForCausalLM": {"num_layers": 3, "activation_function": "silu", "layer_norm_epsilon": 1e-6},
    "MiniCPMForCausalLM": {"scale_emb": 3.0, "scale_depth": 0.4 * 3**0.5, "dim_model_base": 16},
    "OrionForCausalLM": {"rms_norm_eps": 1e-5},
}
