"""Checkpoints of random weights in the shapes of `shapes/`, made once: uniform in ±1e-3, each tensor with its own seed.

Only numpy, since any engine's interpreter may have to read one.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = Path(__file__).parent / "shapes"
SPREAD = 1e-3


def make_checkpoint(shape: str, directory: Path) -> Path:
    """The checkpoint's directory; its files are written unless they are there."""
    target = directory / shape
    if (target / "model.safetensors").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(SHAPES / f"{shape}.json", target / "config.json")
    partial = target / "model.safetensors.partial"
    _write_safetensors(partial, dict(tensor_shapes(config_of(target))))
    os.replace(partial, target / "model.safetensors")
    return target


def config_of(checkpoint: Path) -> dict[str, Any]:
    """What config.json says."""
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    return config


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a Llama, by name."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "self_attn.q_proj.weight", (query, hidden)
        yield layer + "self_attn.k_proj.weight", (key, hidden)
        yield layer + "self_attn.v_proj.weight", (key, hidden)
        yield layer + "self_attn.o_proj.weight", (hidden, query)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        yield layer + "mlp.gate_proj.weight", (inner, hidden)
        yield layer + "mlp.up_proj.weight", (inner, hidden)
        yield layer + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def read_tensor(checkpoint: Path, name: str) -> np.ndarray[Any, Any]:
    """The bits of a bf16 tensor, as uint16 of its shape."""
    path = checkpoint / "model.safetensors"
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[name]
    begin, end = entry["data_offsets"]
    bits = np.memmap(path, np.uint16, "r", 8 + length + begin, ((end - begin) // 2,))
    return bits.reshape(entry["shape"])


def _write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    with path.open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        for name, shape in shapes.items():
            file.write(_random_bf16(name, shape).tobytes())


def _random_bf16(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Uniform in ±SPREAD, cut to bf16; only norms are ones, as trained ones nearly are."""
    if len(shape) == 1:
        return np.full(shape, 0x3F80, np.uint16)
    values = np.random.default_rng(zlib.crc32(name.encode())).random(shape, np.float32)
    bits = ((values * 2 - 1) * np.float32(SPREAD)).view(np.uint32)
    return (bits >> 16).astype(np.uint16)
