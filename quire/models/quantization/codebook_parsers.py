"""How each tool describes 4-bit codes of sixteen values in `quantization_config`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.quantization.description import Quantization, Rule, glob, listed, refused
from quire.models.quantization.formats import CodebookFormat, Format, GroupFormat

_ALL = ("Linear",)
_GROUP = 64
"""bitsandbytes' on all devices of today; a file with another one has absmax of another shape, which is refused."""


def bitsandbytes(config: Mapping[str, Any]) -> Quantization:
    """transformers' BitsAndBytesConfig: nf4 or fp4, or int8, whose activations stay dense here."""
    form: Format
    if config.get("load_in_4bit"):
        values = str(config.get("bnb_4bit_quant_type", "fp4"))
        if values not in ("nf4", "fp4"):
            raise refused(f"has bnb_4bit_quant_type '{values}', which is not supported: served are nf4 and fp4")
        storage = config.get("bnb_4bit_quant_storage", "uint8")
        if storage != "uint8":
            raise refused(f"has codes stored as {storage} (bnb_4bit_quant_storage): served is uint8")
        form = CodebookFormat("bitsandbytes", values, _GROUP, bool(config.get("bnb_4bit_use_double_quant")))  # type: ignore[arg-type]
    elif config.get("load_in_8bit"):
        form = GroupFormat("bitsandbytes", 8, None, symmetric=True)
    else:
        raise refused("has neither load_in_4bit nor load_in_8bit")
    return Quantization("bitsandbytes", (Rule(_ALL, form),), (*listed(config, "llm_int8_skip_modules"), "gate"))


def mxfp4(config: Mapping[str, Any]) -> Quantization:
    """transformers' mxfp4, as gpt-oss has it: all experts of a layer in one tensor."""
    ignored = listed(config, "modules_to_not_convert")
    rule = Rule(("re:.*\\.experts\\.",), CodebookFormat("mxfp4", "e2m1", 32))
    return Quantization("mxfp4", (rule,), ignored)


def quark(config: Mapping[str, Any]) -> Quantization:
    """AMD's Quark: mxfp4 weights; activations, which it quantizes as well, stay dense here."""
    everywhere = config["global_quant_config"]
    if config.get("layer_quant_config") or config.get("layer_type_quant_config"):
        raise refused("has settings for single layers (layer_quant_config), which are not supported")
    weight = everywhere["weight"]
    weight = weight[0] if isinstance(weight, list) and len(weight) == 1 else weight
    kind = (weight.get("dtype"), weight.get("qscheme"), weight.get("group_size"), weight.get("scale_format"))
    if kind != ("fp4", "per_group", 32, "e8m0"):
        raise refused(f"is Quark's {' '.join(map(str, kind))}, which is not supported: served is fp4 per_group 32 e8m0")
    form = CodebookFormat("quark", "e2m1", 32)
    return Quantization("quark", (Rule(_ALL, form),), (*map(glob, listed(config, "exclude")), "gate"))


def compressed_floats(stored: str, weights: Mapping[str, Any]) -> CodebookFormat | None:
    """compressed-tensors' 4-bit floats; None: it is something else."""
    group = {"mxfp4-pack-quantized": 32, "nvfp4-pack-quantized": 16}.get(stored)
    if group is None:
        return None
    if weights["num_bits"] != 4 or weights.get("type") != "float" or weights.get("group_size") != group:
        raise refused(f"has the format '{stored}' without 4-bit floats in groups of {group}")
    return CodebookFormat("compressed-tensors", "e2m1", group)
