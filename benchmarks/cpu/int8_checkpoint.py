"""A checkpoint whose linear layers are int8, a scale for each output: W8A8 of compressed-tensors, to the nearest.

The head is too, as in the files and models of 8 bits that other engines make of a checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import config_of, read_tensor, tensor_shapes

SUFFIX = "-int8"
_LARGEST = 127
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_ROWS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_DESCRIPTION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": _ROWS}},
    "ignore": [],
}


def make_int8_checkpoint(checkpoint: Path) -> Path:
    """A directory beside the checkpoint's, made unless it is there."""
    target = checkpoint.with_name(checkpoint.name + SUFFIX)
    path = target / "model.safetensors"
    if not path.exists():
        target.mkdir(exist_ok=True)
        config = config_of(checkpoint) | {"quantization_config": _DESCRIPTION}
        (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        partial = path.with_suffix(".partial")
        _write(checkpoint, partial)
        os.replace(partial, path)
    return target


def _write(checkpoint: Path, path: Path) -> None:
    header: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape, bytes_of_each in _tensors(checkpoint):
        end = offset + bytes_of_each * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    with path.open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        for name, _ in tensor_shapes(config_of(checkpoint)):
            bits = np.asarray(read_tensor(checkpoint, name))
            if not _is_quantized(name):
                file.write(bits.tobytes())
                continue
            weight = (bits.astype(np.uint32) << 16).view(np.float32)
            scales = np.abs(weight).max(1, keepdims=True) / _LARGEST
            file.write(np.rint(weight / scales).astype(np.int8).tobytes() + scales.astype(np.float32).tobytes())


def _tensors(checkpoint: Path) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Name, dtype, shape and bytes of an element, in the file's order."""
    for name, shape in tensor_shapes(config_of(checkpoint)):
        if _is_quantized(name):
            yield name, "I8", shape, 1
            yield f"{name}_scale", "F32", (shape[0], 1), 4
        else:
            yield name, "BF16", shape, 2


def _is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight") or name == "lm_head.weight"
