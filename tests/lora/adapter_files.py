"""Adapters written by hand, for what PEFT would never write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.models.lora.updates import LowRankUpdates
from quire.models.quantization.scheme import LinearShape
from quire.models.weights.checkpoint import StoredTensor

HIDDEN, WIDTH = 12, 20
PREFIX = "base_model.model.model.layers.0"


def small_updates(slots: int = 2, limit: int = 8) -> LowRankUpdates:
    """Of a model with one layer: merged queries, keys and values, and a projection back."""
    updates = LowRankUpdates(slots, limit, "cpu")
    names = tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
    updates.update_of(LinearShape(names, (HIDDEN, 4, 4), HIDDEN))
    updates.update_of(LinearShape(("model.layers.0.mlp.down_proj",), (HIDDEN,), WIDTH))
    return updates


class Base:
    """The base model's files: one module's weights are 0, the other's quantized."""

    def contents(self) -> dict[str, StoredTensor]:
        return {
            "model.layers.0.self_attn.k_proj.weight": StoredTensor((4, HIDDEN), "F32"),
            "model.layers.0.mlp.down_proj.weight": StoredTensor((HIDDEN, WIDTH), "F8_E4M3"),
        }

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        out.zero_()

    def close(self) -> None:
        pass


def pair(module: str, rank: int, rows: int, columns: int) -> dict[str, Tensor]:
    return {
        f"{PREFIX}.{module}.lora_A.weight": torch.randn(rank, columns),
        f"{PREFIX}.{module}.lora_B.weight": torch.randn(rows, rank),
    }


def whole(rank: int = 4) -> dict[str, Tensor]:
    """Of two modules of `small_updates`."""
    return pair("self_attn.k_proj", rank, 4, HIDDEN) | pair("mlp.down_proj", rank, HIDDEN, WIDTH)


def write(directory: Path, tensors: dict[str, Tensor] | bytes | None = None, **settings: Any) -> Path:
    """Write an adapter; settings beside r and lora_alpha."""
    directory.mkdir(exist_ok=True)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | settings
    (directory / "adapter_config.json").write_text(json.dumps({k: v for k, v in fields.items() if v != "missing"}))
    path = directory / "adapter_model.safetensors"
    if isinstance(tensors, bytes):
        path.write_bytes(tensors)
    else:
        save_file(whole() if tensors is None else tensors, path)
    return directory
