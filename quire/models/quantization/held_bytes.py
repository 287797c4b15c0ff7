"""How many bytes quantized weights take where they live: from the headers of a checkpoint's files, or, where there are
no files, from the number of weights. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.models.quantization.formats import (
    MICROSCALED,
    CodebookFormat,
    Format,
    Fp8Format,
    GgufFormat,
    GroupFormat,
    Quantization,
)
from quire.models.weights.safetensors_files import is_of_layer, located_tensors, text_name

_SCALE_BYTES = 4
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16}
"""Bits of safetensors' dtypes; all others have 8."""
_CONVERTED = ("F64", "F32", "F16", "BF16")
_SCALES = ("scales", "weight_scale", "weight_scale_inv", "absmax", "SCB")
_SCALES_AS_STORED = ("F8_E4M3", "F8_E8M0", "U8")
"""Dtypes of scales that are kept as they are, but for bitsandbytes', which are quantized themselves."""
_FACTORS = ("weight_global_scale", "weight_scale_2")
_ZERO_POINTS = ("qzeros", "weight_zero_point")
_ZERO_POINT_BYTES = 1
"""A processor's layout has one for each group, also where they are all the same."""
_NOT_KEPT = (
    *("input_scale", "g_idx", "weight_g_idx", "weight_shape", "k_scale", "v_scale", "input_global_scale"),
    *("quant_map", "nested_absmax", "nested_quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4", "weight_format"),
    *_FACTORS,  # counted with the codes: one for each output
    *_ZERO_POINTS,  # counted with the scales
)
_LOOKED_UP = ("embed_tokens", "wte", "wpe")


@dataclass(frozen=True)
class HeldWeights:
    """What a model's weights take: the number of weights in the model's dtype, and the bytes of all others and of
    scales.
    """

    dense: int
    fixed: int


def held_in(directory: Path, quantization: Quantization, tied: bool, left_out: range) -> HeldWeights | None:
    """What the weights of a directory's checkpoint take; None if it has no files, or `held_weights` cannot tell.

    A GGUF model's description says it, for a processor, which keeps types as they are.
    """
    form = quantization.rules[0].format
    if isinstance(form, GgufFormat):
        return HeldWeights(form.dense, form.packed)
    files = sorted(directory.glob("*.safetensors"))
    return held_weights(files, quantization, tied, left_out) if files else None


def held_weights(
    files: Sequence[Path], quantization: Quantization, tied: bool, left_out: range = range(0)
) -> HeldWeights | None:
    """What the weights of safetensors files take; None if these cannot be read, which reading the weights reports.

    Args:
        files: The checkpoint's files.
        quantization: Which modules have which format.
        tied: Whether the head is the embedding, so that a head of its own is not kept.
        left_out: The numbers of layers that no model reads.
    """
    dense = fixed = 0
    try:
        for stored, tensor in located_tensors(files):
            if (name := text_name(stored)) is None or is_of_layer(name, left_out):
                continue
            dtype, shape = tensor.dtype, tensor.shape
            module, _, kind = name.rpartition(".")
            if kind in _NOT_KEPT or (tied and module == "lm_head"):
                continue
            size = math.prod(shape)
            if kind in _SCALES:
                fixed += size * (1 if dtype in _SCALES_AS_STORED and kind != "absmax" else _SCALE_BYTES)
                fixed += size * _ZERO_POINT_BYTES * isinstance(quantization.format_of(module), GroupFormat)
            elif dtype not in _CONVERTED:
                fixed += size * _BITS.get(dtype, 8) // 8 + _factor_bytes(module, shape, quantization)
            elif (form := _format_at_load(module, kind, quantization)) is not None:
                fixed += _bytes_of(size, shape[-1], form)
            else:
                dense += size
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return HeldWeights(dense, fixed)


def expected_weights(weights: int, quantized: Mapping[Format, int], columns: int) -> HeldWeights:
    """What the weights of a checkpoint take that is not there.

    Args:
        weights: The number of a model's weights.
        quantized: How many of them have each format; all others are dense.
        columns: The inputs of a usual linear layer.
    """
    taken = sum(_bytes_of(count, columns, form) for form, count in quantized.items())
    return HeldWeights(weights - sum(quantized.values()), taken)


def _bytes_of(weights: int, columns: int, form: Format) -> int:
    """Bytes of so many weights in this format."""
    if isinstance(form, GroupFormat):
        groups = weights // (form.group or columns)
        return weights * form.bits // 8 + groups * (_SCALE_BYTES + _ZERO_POINT_BYTES)
    if isinstance(form, CodebookFormat):
        scale = _SCALE_BYTES if form.group > MICROSCALED else 1
        return weights // 2 + weights // form.group * scale + _factors_of(form) * weights // columns
    return weights + weights // columns * _SCALE_BYTES


def _factors_of(form: Format | None) -> int:
    """Bytes of the factor that each output has besides its scales."""
    return _SCALE_BYTES if isinstance(form, CodebookFormat) and form.group < MICROSCALED else 0


def _factor_bytes(module: str, shape: Sequence[int], quantization: Quantization) -> int:
    return shape[0] * _factors_of(quantization.format_of(module)) if len(shape) > 1 else 0


def _format_at_load(module: str, kind: str, quantization: Quantization) -> Format | None:
    """The format of a dense weight that is quantized as it is loaded; None: it stays dense."""
    form = quantization.format_of(module)
    is_linear = kind == "weight" and module.rpartition(".")[2] not in _LOOKED_UP and not module.endswith("norm")
    at_load = isinstance(form, (Fp8Format, CodebookFormat)) and form.at_load
    return form if at_load and is_linear else None
