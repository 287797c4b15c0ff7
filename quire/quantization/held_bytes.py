"""How many bytes quantized weights take where they live: from the headers of a checkpoint's files, or, where there are
none, from how many weights there are. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.quantization.description import Quantization
from quire.quantization.formats import Format, Fp8Format, GgufFormat, GroupFormat

_LENGTH_BYTES = 8
_SCALE_BYTES = 4
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16}
"""By safetensors' words; all others have 8."""
_CONVERTED = ("F64", "F32", "F16", "BF16")
_SCALES = ("scales", "weight_scale", "weight_scale_inv")
_NOT_KEPT = ("input_scale", "g_idx", "weight_g_idx", "weight_shape", "k_scale", "v_scale")
_LOOKED_UP = ("embed_tokens", "wte", "wpe")


@dataclass(frozen=True)
class HeldWeights:
    """What a model's weights take.

    Attributes:
        dense: Weights of the model's dtype.
        fixed: Bytes of all others, and of scales.
    """

    dense: int
    fixed: int


def held_in(directory: Path, quantization: Quantization, tied: bool) -> HeldWeights | None:
    """Of the checkpoint in this directory; None where it has no files, or `held_weights` has none.

    A GGUF model's description has it; it is of a processor, which keeps types as they are.
    """
    form = quantization.rules[0].format
    if isinstance(form, GgufFormat):
        return HeldWeights(form.dense, form.packed)
    files = sorted(directory.glob("*.safetensors"))
    return held_weights(files, quantization, tied) if files else None


def held_weights(files: Sequence[Path], quantization: Quantization, tied: bool) -> HeldWeights | None:
    """Of a checkpoint's safetensors files; None where they cannot be read, which reading weights will say.

    Args:
        tied: A head of its own is not kept.
    """
    dense = fixed = 0
    try:
        for name, dtype, shape in _headers(files):
            module, _, kind = name.rpartition(".")
            if kind in _NOT_KEPT or (tied and module == "lm_head"):
                continue
            size = math.prod(shape)
            if kind in _SCALES:
                fixed += size * _SCALE_BYTES
            elif dtype not in _CONVERTED:
                fixed += size * _BITS.get(dtype, 8) // 8
            elif _is_quantized_at_load(module, kind, quantization):
                fixed += size + shape[0] * _SCALE_BYTES
            else:
                dense += size
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return HeldWeights(dense, fixed)


def expected_weights(weights: int, linear: int, columns: int, form: Format | None) -> HeldWeights:
    """Of a checkpoint that is not there.

    Args:
        weights: All of a model's.
        linear: Those among them that this format has.
        columns: Of a usual linear layer.
    """
    if form is None:
        return HeldWeights(weights, 0)
    group = (form.group or columns) if isinstance(form, GroupFormat) else columns
    bits = form.bits if isinstance(form, GroupFormat) else 8
    zeros = isinstance(form, GroupFormat) and not form.symmetric
    return HeldWeights(weights - linear, linear * bits // 8 + linear // group * (_SCALE_BYTES + zeros))


def _is_quantized_at_load(module: str, kind: str, quantization: Quantization) -> bool:
    form = quantization.format_of(module)
    is_linear = kind == "weight" and module.rpartition(".")[2] not in _LOOKED_UP and not module.endswith("norm")
    return isinstance(form, Fp8Format) and form.at_load and is_linear


def _headers(files: Sequence[Path]) -> Iterator[tuple[str, str, list[int]]]:
    """Name, dtype and shape of every tensor."""
    for path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > path.stat().st_size:
                raise ValueError("cut short")
            for name, entry in json.loads(file.read(length)).items():
                if name != "__metadata__":
                    yield name, entry["dtype"], entry["shape"]
