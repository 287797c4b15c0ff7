"""What quantizes a model's weights: `quantization_config`, as each tool writes it, and --quantization.

Whatever is not served is refused here by name, before any weight is read. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quire.errors import ConfigError
from quire.models.quantization.formats import (
    CodebookFormat,
    Format,
    Fp8Format,
    GgufFormat,
    GroupFormat,
    Int8Format,
    Quantization,
    Rule,
    glob,
    listed,
    refused,
)
from quire.models.weights.safetensors_files import text_name

_ALL = ("Linear",)
_GROUPED_BITS = (4, 8)
_BITSANDBYTES_GROUP = 64
"""The group of bitsandbytes on all devices of today; with another one, absmax has another shape, which is refused."""
_ALIASES = {"compressed_tensors": "compressed-tensors", "awq_marlin": "awq", "gptq_marlin": "gptq"}
"""vLLM's names of kernels, which its users give in place of a format's."""
_ROUTERS = ("gate", "router", "shared_expert_gate")
"""Parts of the names of routers, and of the gate of a shared expert, which tools leave dense without saying so."""
AT_LOAD: dict[str, Quantization] = {
    "fp8": Quantization("fp8", (Rule(_ALL, Fp8Format(at_load=True)),), ignored=_ROUTERS),
    "bitsandbytes": Quantization("bitsandbytes", (Rule(_ALL, CodebookFormat("dense", "nf4", 64)),), ignored=_ROUTERS),
}
"""What --quantization makes of dense weights; routers of experts stay as they are."""


def read_quantization(described: object, asked: str | None) -> Quantization | None:
    """Find out what quantizes a model's weights; None: nothing does.

    Args:
        described: The checkpoint's `quantization_config`, if it has one.
        asked: --quantization.

    Raises:
        CheckpointError: The checkpoint is quantized in a way that is not served.
        ConfigError: --quantization contradicts the checkpoint, or is not known.
    """
    asked = _ALIASES.get(asked, asked) if asked else None
    if asked is not None and asked not in {*PARSERS, *AT_LOAD}:
        raise ConfigError(
            f"--quantization {asked} is not supported: served are {', '.join(sorted({*PARSERS, *AT_LOAD}))}. Leave it "
            "out for a checkpoint that says itself how it is quantized.",
            param="quantization",
        )
    if not described:
        if asked is None or asked in AT_LOAD:
            return AT_LOAD[asked] if asked else None
        raise ConfigError(
            f"--quantization {asked}: the checkpoint's config.json has no quantization_config, so its weights are not "
            f"quantized: leave it out, or give {' or '.join(AT_LOAD)}, which quantize at the start.",
            param="quantization",
        )
    found = _parse(described)
    if asked is not None and asked != found.method:
        raise ConfigError(
            f"--quantization {asked}: the checkpoint is quantized by {found.method}: leave the flag out.",
            param="quantization",
        )
    return found


def _parse(described: object) -> Quantization:
    if not isinstance(described, Mapping):
        raise refused(f"is {described!r}, it must be an object")
    method = str(described.get("quant_method", "modelopt" if "quant_algo" in described else "unknown")).lower()
    method = _ALIASES.get(method, method)
    if method == "unknown" and described.keys() >= {"bits", "group_size"}:
        raise refused("is MLX's, which only Apple's devices compute")
    if method not in PARSERS:
        raise refused(f"has quant_method '{method}', which is not supported: served are {', '.join(PARSERS)}")
    try:
        return PARSERS[method](_without_nulls(described))
    except (TypeError, ValueError, AttributeError, KeyError, re.error) as error:
        raise refused(f"cannot be read as {method} writes it ({error!r})") from None


def _without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """Remove keys whose value is null, at any depth: they count as absent."""
    return {
        key: _without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value is not None
    }


def fp8(config: Mapping[str, Any]) -> Quantization:
    """Read transformers' fp8: one scale for the tensor, or for each block of `weight_block_size` (DeepSeek-V3, section
    3.3)."""
    ignored = listed(config, "modules_to_not_convert", "ignored_layers")
    block = config.get("weight_block_size")
    static = config.get("activation_scheme", "dynamic") == "static"
    input_scale = "input_scale" if static else None
    if block is None:
        form = Fp8Format("tensor", input_scale=input_scale)
    else:
        rows, columns = map(int, block)
        if columns != 128 or rows != 128:
            raise refused(f"has blocks of {rows} × {columns}: served are 128 × 128")
        form = Fp8Format("block", (rows, columns), "weight_scale_inv", input_scale=input_scale)
    return Quantization("fp8", (Rule(_ALL, form),), (*ignored, *_ROUTERS))


def modelopt(config: Mapping[str, Any]) -> Quantization:
    """Read NVIDIA's ModelOpt: FP8 with one scale for the tensor and one for activations, NVFP4, whose activations stay
    dense here, or MIXED_PRECISION, which names the modules of each (`quantized_layers`)."""
    ignored = tuple(glob(name) for name in listed(config, "ignore", "exclude_modules"))
    algorithm = str(config.get("quant_algo", "")).upper()
    if algorithm != "MIXED_PRECISION":
        return Quantization("modelopt", (Rule(_ALL, _modelopt_format(algorithm)),), (*ignored, *_ROUTERS))
    modules: dict[Format, set[str]] = {}
    for name, layer in config["quantized_layers"].items():
        form = _modelopt_format(str(layer.get("quant_algo", "")).upper())
        modules.setdefault(form, set()).add(text_name(name) or name)
    if not modules:
        raise refused("quantizes no weights")
    rules = tuple(Rule((), form, frozenset(names)) for form, names in modules.items())
    return Quantization("modelopt", rules, (*ignored, *_ROUTERS), any("lm_head" in rule.modules for rule in rules))


def _modelopt_format(algorithm: str) -> Format:
    forms: dict[str, Format] = {
        "FP8": Fp8Format("tensor", input_scale="input_scale"),
        "NVFP4": CodebookFormat("modelopt", "e2m1", 16),
        "W4A16_NVFP4": CodebookFormat("modelopt", "e2m1", 16),
    }
    if algorithm not in forms:
        raise refused(
            f"is ModelOpt's {algorithm or 'without quant_algo'}, which is not supported: served are FP8 and NVFP4"
        )
    return forms[algorithm]


def gptq(config: Mapping[str, Any]) -> Quantization:
    """Read what AutoGPTQ and GPTQModel write."""
    if config.get("dynamic"):
        raise refused("has 'dynamic' rules for single modules, which are not supported")
    form = GroupFormat(
        "gptq_v2" if config.get("checkpoint_format") == "gptq_v2" else "gptq",
        _bits(config.get("bits")),
        _group(config.get("group_size", 128)),
        bool(config.get("sym", True)),
        bool(config.get("desc_act", False)),
    )
    head = config.get("lm_head") is True
    return Quantization("gptq", (Rule(_ALL, form),), (*listed(config, "modules_to_not_convert"), *_ROUTERS), head)


def awq(config: Mapping[str, Any]) -> Quantization:
    """Read AutoAWQ's layout for its GEMM kernels."""
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise refused(f"has version '{version}', which is not supported: served is gemm")
    bits = _bits(config.get("bits", config.get("w_bit", 4)))
    if bits != 4:
        raise refused(f"has {bits} bits: AWQ is served with 4")
    group = _group(config.get("group_size", config.get("q_group_size", 128)))
    form = GroupFormat("awq", bits, group, symmetric=not config.get("zero_point", True))
    return Quantization("awq", (Rule(_ALL, form),), (*listed(config, "modules_to_not_convert"), *_ROUTERS))


def gguf(config: Mapping[str, Any]) -> Quantization:
    """Read what compute/gguf/model_config.py writes."""
    types = sorted(config["types"].items(), key=lambda item: -item[1])
    sizes = {name: int(config[name]) for name in ("dense", "packed", "gpu_dense", "coded")}
    form = GgufFormat(tuple((str(name), int(count)) for name, count in types), **sizes)
    return Quantization("gguf", (Rule(_ALL, form),), head=True)


def compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    """Read compressed-tensors, which llm-compressor writes."""
    if config.get("sparsity_config") not in (None, {}) and config["sparsity_config"].get("format", "dense") != "dense":
        raise refused(f"has sparse weights ({config['sparsity_config'].get('format')}), which are not supported")
    if config.get("transform_config") not in (None, {}):
        raise refused("has transforms of activations, which are not supported")
    rules = tuple(_compressed_rules(config))
    if not rules:
        raise refused("quantizes no weights")
    head = any("lm_head" in target for rule in rules for target in rule.targets)
    ignored = listed(config, "ignore")
    return Quantization("compressed-tensors", rules, ignored, head or "lm_head" not in ignored)


def bitsandbytes(config: Mapping[str, Any]) -> Quantization:
    """Read transformers' BitsAndBytesConfig: nf4, fp4, or int8, whose activations stay dense here."""
    form: Format
    if config.get("load_in_4bit"):
        values = str(config.get("bnb_4bit_quant_type", "fp4"))
        if values not in ("nf4", "fp4"):
            raise refused(f"has bnb_4bit_quant_type '{values}', which is not supported: served are nf4 and fp4")
        storage = config.get("bnb_4bit_quant_storage", "uint8")
        if storage != "uint8":
            raise refused(f"has codes stored as {storage} (bnb_4bit_quant_storage): served is uint8")
        nested = bool(config.get("bnb_4bit_use_double_quant"))
        form = CodebookFormat("bitsandbytes", values, _BITSANDBYTES_GROUP, nested)  # type: ignore[arg-type]
    elif config.get("load_in_8bit"):
        form = GroupFormat("bitsandbytes", 8, None, symmetric=True)
    else:
        raise refused("has neither load_in_4bit nor load_in_8bit")
    return Quantization("bitsandbytes", (Rule(_ALL, form),), (*listed(config, "llm_int8_skip_modules"), *_ROUTERS))


def mxfp4(config: Mapping[str, Any]) -> Quantization:
    """Read transformers' mxfp4, as gpt-oss has it: all experts of a layer in one tensor."""
    ignored = listed(config, "modules_to_not_convert")
    rule = Rule(("re:.*\\.experts\\.",), CodebookFormat("mxfp4", "e2m1", 32))
    return Quantization("mxfp4", (rule,), ignored)


def quark(config: Mapping[str, Any]) -> Quantization:
    """Read AMD's Quark with mxfp4 weights; activations, which it quantizes as well, stay dense here."""
    everywhere = config["global_quant_config"]
    if config.get("layer_quant_config") or config.get("layer_type_quant_config"):
        raise refused("has settings for single layers (layer_quant_config), which are not supported")
    weight = everywhere["weight"]
    weight = weight[0] if isinstance(weight, list) and len(weight) == 1 else weight
    kind = (weight.get("dtype"), weight.get("qscheme"), weight.get("group_size"), weight.get("scale_format"))
    if kind != ("fp4", "per_group", 32, "e8m0"):
        raise refused(f"is Quark's {' '.join(map(str, kind))}, which is not supported: served is fp4 per_group 32 e8m0")
    form = CodebookFormat("quark", "e2m1", 32)
    return Quantization("quark", (Rule(_ALL, form),), (*map(glob, listed(config, "exclude")), *_ROUTERS))


def _compressed_rules(config: Mapping[str, Any]) -> Iterator[Rule]:
    for name, group in config["config_groups"].items():
        stored = group.get("format") or config.get("format", "dense")
        if group.get("output_activations"):
            raise refused(f"quantizes outputs ({name}), which is not supported")
        yield Rule(
            tuple(group["targets"]), _compressed_format(stored, group["weights"], group.get("input_activations"))
        )


def _compressed_format(stored: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Format:
    if (floats := _compressed_floats(stored, weights)) is not None:
        return floats
    kind, bits = weights.get("type", "int"), weights.get("num_bits")
    strategy: Any = weights.get("strategy") or _usual_strategy(weights.get("group_size"))
    if stored == "float-quantized" and kind == "float" and bits == 8:
        if strategy not in ("tensor", "channel", "block"):
            raise refused(f"has fp8 scales by {strategy}: served are tensor, channel and block")
        block = tuple(map(int, weights.get("block_structure") or (128, 128)))
        if block != (128, 128):
            raise refused(f"has blocks of {block}: served are 128 × 128")
        static = inputs is not None and not inputs.get("dynamic", False)
        return Fp8Format(strategy, input_scale="input_scale" if static else None)
    if stored == "int-quantized" and kind == "int" and bits == 8 and inputs is not None:
        if strategy not in ("tensor", "channel") or not weights.get("symmetric", True) or not inputs.get("dynamic"):
            raise refused("has int8 weights that are not symmetric by channel, with dynamic activations by token")
        return Int8Format(strategy)
    if stored == "pack-quantized" and kind == "int" and inputs is None and strategy in ("group", "channel"):
        group = _group(weights.get("group_size") if strategy == "group" else -1)
        reordered = weights.get("actorder") in ("group", True)
        return GroupFormat("compressed-tensors", _bits(bits), group, bool(weights.get("symmetric", True)), reordered)
    raise refused(f"has the format '{stored}' with {kind}{bits} weights by {strategy}, which is not supported")


def _compressed_floats(stored: str, weights: Mapping[str, Any]) -> CodebookFormat | None:
    """The format of compressed-tensors' 4-bit floats; None: the weights are something else."""
    group = {"mxfp4-pack-quantized": 32, "nvfp4-pack-quantized": 16}.get(stored)
    if group is None:
        return None
    if weights["num_bits"] != 4 or weights.get("type") != "float" or weights.get("group_size") != group:
        raise refused(f"has the format '{stored}' without 4-bit floats in groups of {group}")
    return CodebookFormat("compressed-tensors", "e2m1", group)


def _usual_strategy(group: int | None) -> str:
    """The strategy that the size of a group means if no `strategy` is given."""
    return "tensor" if group is None else "channel" if group == -1 else "group"


def _bits(bits: Any) -> int:
    if bits not in _GROUPED_BITS:
        raise refused(f"has {bits} bits: served are 4 and 8")
    return int(bits)


def _group(size: Any) -> int | None:
    if size in (None, -1):
        return None
    if size not in (32, 64, 128):
        raise refused(f"has groups of {size}: served are 32, 64, 128 and -1")
    return int(size)


PARSERS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "fp8": fp8,
    "compressed-tensors": compressed_tensors,
    "gptq": gptq,
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "mxfp4": mxfp4,
    "quark": quark,
    "gguf": gguf,
    "modelopt": modelopt,
}
"""By `quant_method`: what reads the rest of a `quantization_config`."""
