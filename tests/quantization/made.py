"""Tiny quantized checkpoints, made from the published descriptions of what each tool writes.

`quantize(dense, method)` rewrites a dense checkpoint in place and leaves beside it what its tensors stand for, as a
dense checkpoint that transformers reads. Packing follows: AutoGPTQ's `QuantLinear.pack`, AutoAWQ's `WQLinear_GEMM`,
compressed-tensors' `pack_to_int32`, DeepSeek-V3's `weight_scale_inv`, bitsandbytes' `QuantState.as_dict`; mxfp4 and
NVFP4 as the functions here say.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.compute.kernels.reference.linear import CODEBOOKS, nearest_codes
from tests.checkpoints import edit_config

Made = tuple[dict[str, Tensor], Tensor]
"""A module's tensors by what stands behind its name, and the weight that they stand for."""
GPTQ_ORDER = range(8)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def quantize(
    directory: Path, config: dict[str, Any], make: Callable[[Tensor], Made], which: Callable[[str], bool] = str
) -> Path:
    """Quantize the linear layers whose names `which` takes; returns the directory of the dense equal."""
    dense = directory.with_name(directory.name + "-dense")
    shutil.copytree(directory, dense)
    stored = load_file(directory / "model.safetensors")
    stands_for = dict(stored)
    for name in [name for name in stored if re.search(r"(_proj|_with_mqa|\.w[123])\.weight$", name)]:
        module = name.removesuffix(".weight")
        if which(module):
            tensors, stands_for[name] = make(stored.pop(name).float())
            stored.update({f"{module}.{key}": value.contiguous() for key, value in tensors.items()})
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    save_file(stands_for, dense / "model.safetensors", {"format": "pt"})
    edit_config(directory, {"quantization_config": config})
    return dense


def pack(codes: Tensor, bits: int, order: Any = GPTQ_ORDER) -> Tensor:
    """[n, m] → [n, m · bits / 32] int32: of each word's codes, number order[i] is the i-th from the lowest bits."""
    each = 32 // bits
    order = order if bits == 4 else range(each)
    parts = codes.long().view(len(codes), -1, each)
    words = sum(parts[:, :, number] << (bits * place) for place, number in enumerate(order))
    return words.where(words < 1 << 31, words - (1 << 32)).to(torch.int32)


def grouped(w: Tensor, bits: int, group: int | None, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [rows, columns], scales and zeros [rows, groups], and the weight that they stand for."""
    rows, columns = w.shape
    parts = w.view(rows, -1, group or columns)
    most = (1 << bits) - 1
    if symmetric:
        scales = parts.abs().amax(-1) / (most // 2)
        zeros = torch.full_like(scales, (most + 1) // 2)
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scales = (high - low) / most
        zeros = (-low / scales).round().clamp(1, most)
    scales = scales.half().float()
    codes = (parts / scales.unsqueeze(-1)).round().add(zeros.unsqueeze(-1)).clamp(0, most)
    stands_for = (codes - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)
    return codes.view(rows, columns), scales, zeros, stands_for.view(rows, columns)


def gptq(w: Tensor, bits: int, group: int | None, symmetric: bool, reordered: bool = False, version: int = 1) -> Made:
    columns = w.shape[1]
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(5)) if reordered else torch.arange(columns)
    codes, scales, zeros, stands_for = grouped(w[:, order], bits, group, symmetric)
    back = order.argsort()
    tensors = {
        "qweight": pack_rows(codes[:, back].T, bits),
        "qzeros": pack(zeros.T - int(version == 1), bits),
        "scales": scales.T.half(),
        "g_idx": (back // (group or columns)).int(),
    }
    return tensors, stands_for[:, back]


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """[n, m] → [n · bits / 32, m]: words of codes below each other."""
    return pack(codes.T, bits).T


def awq(w: Tensor, group: int, symmetric: bool) -> Made:
    codes, scales, zeros, stands_for = grouped(w, 4, group, symmetric)
    tensors = {"qweight": pack(codes.T, 4, AWQ_ORDER), "scales": scales.T.half()}
    if not symmetric:
        tensors["qzeros"] = pack(zeros.T, 4, AWQ_ORDER)
    return tensors, stands_for


def compressed(w: Tensor, bits: int, group: int | None, symmetric: bool, reordered: bool = False) -> Made:
    columns = w.shape[1]
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(5)) if reordered else torch.arange(columns)
    codes, scales, zeros, stands_for = grouped(w[:, order], bits, group, symmetric)
    back = order.argsort()
    tensors = {
        "weight_packed": pack(codes[:, back], bits),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(w.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack_rows(zeros, bits)
    if reordered:
        tensors["weight_g_idx"] = (back // (group or columns)).int()
    return tensors, stands_for[:, back]


def bitsandbytes(w: Tensor, values: str = "nf4") -> Made:
    """As bitsandbytes.functional.quantize_4bit without nested scales; with them it is in by_tools/."""
    codes, scales = nearest_codes(w, values, 64)
    pairs = codes.view(-1, 2)
    state = json.dumps({"quant_type": values, "blocksize": 64, "dtype": "float32", "shape": list(w.shape)})
    tensors = {
        "weight": (pairs[:, :1] << 4 | pairs[:, 1:]),
        "weight.absmax": scales.flatten(),
        "weight.quant_map": torch.tensor(CODEBOOKS[values]),
        f"weight.quant_state.bitsandbytes__{values}": torch.tensor(list(state.encode()), dtype=torch.uint8),
    }
    parts = torch.tensor(CODEBOOKS[values])[codes.long()].view(len(w), -1, 64) * scales.unsqueeze(-1)
    return tensors, parts.view(w.shape)


def bitsandbytes_int8(w: Tensor) -> Made:
    largest = w.abs().amax(1)
    codes = (w * 127 / largest.unsqueeze(1)).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * largest.unsqueeze(1) / 127


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def microscaled(w: Tensor, codes_name: str = "weight_packed", scales_name: str = "weight_scale") -> Made:
    """mxfp4: e2m1 with a power of two for 32 columns (Open Compute Project, MX version 1.0, section 6.3)."""
    parts = w.view(len(w), -1, 32)
    exponents = (parts.abs().amax(-1).log2().floor() - 2).clamp(-127, 127)
    packed, values = _e2m1(parts / exponents.exp2().unsqueeze(-1))
    tensors = {codes_name: packed, scales_name: (exponents + 127).to(torch.uint8)}
    return tensors, (values * exponents.exp2().unsqueeze(-1)).view(w.shape)


def nvfp4(w: Tensor, tool: str) -> Made:
    """e2m1 with an e4m3 scale for 16 columns and a factor: compressed-tensors divides by it, ModelOpt multiplies."""
    parts = w.view(len(w), -1, 16)
    factor = w.abs().max() / (6 * 448)
    scales = (parts.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
    whole = scales.float().unsqueeze(-1) * factor
    packed, values = _e2m1(parts / whole)
    if tool == "modelopt":
        tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": factor, "input_scale": torch.tensor(0.1)}
        return tensors, (values * whole).view(w.shape)
    tensors = {
        "weight_packed": packed,
        "weight_scale": scales,
        "weight_global_scale": (1 / factor).view(1),
        "input_global_scale": torch.tensor([3.0]),
    }
    return tensors, (values * whole).view(w.shape)


def _e2m1(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes two to a byte, the first in its low bits, [rows, columns / 2], and what they stand for."""
    nearest = (x.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    codes = (nearest + 8 * (x < 0)).to(torch.uint8).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, E2M1[nearest] * x.sign()


def scaled(w: Tensor, scales: str, name: str = "weight_scale", dtype: torch.dtype = torch.float8_e4m3fn) -> Made:
    """fp8 or int8, with scales of the tensor, of channels or of blocks of 128 × 128."""
    largest = 127 if dtype == torch.int8 else 448
    rows, columns = w.shape
    block = {"tensor": (rows, columns), "channel": (1, columns), "block": (128, 128)}[scales]
    down, across = -(-rows // block[0]), -(-columns // block[1])
    padded = torch.nn.functional.pad(w, (0, across * block[1] - columns, 0, down * block[0] - rows))
    parts = padded.view(down, block[0], across, block[1])
    scale = parts.abs().amax((1, 3), keepdim=True) / largest
    codes = (parts / scale).round() if dtype == torch.int8 else parts / scale
    codes = codes.to(dtype)
    stands_for = (codes.float() * scale).view(down * block[0], -1)[:rows, :columns]
    whole = codes.view(torch.uint8).view(down * block[0], -1)[:rows, :columns].contiguous().view(dtype)
    stored = scale.view(down, across)
    return {"weight": whole, name: stored.view(()) if scales == "tensor" else stored}, stands_for.contiguous()
