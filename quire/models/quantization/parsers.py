"""How each tool writes `quantization_config`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quire.models.quantization.codebook_parsers import compressed_floats
from quire.models.quantization.description import Quantization, Rule, glob, listed, refused
from quire.models.quantization.formats import CodebookFormat, Format, Fp8Format, GgufFormat, GroupFormat, Int8Format

_ALL = ("Linear",)
_GROUPED_BITS = (4, 8)


def fp8(config: Mapping[str, Any]) -> Quantization:
    """transformers' fp8: scales of the tensor, or of blocks where `weight_block_size` says so (DeepSeek-V3, section
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
    return Quantization("fp8", (Rule(_ALL, form),), (*ignored, "gate"))


def modelopt(config: Mapping[str, Any]) -> Quantization:
    """NVIDIA's ModelOpt: FP8 with one scale for the tensor, and one for activations; NVFP4, activations of which stay
    dense here."""
    algorithm = str(config.get("quant_algo", "")).upper()
    forms: dict[str, Format] = {
        "FP8": Fp8Format("tensor", input_scale="input_scale"),
        "NVFP4": CodebookFormat("modelopt", "e2m1", 16),
    }
    if algorithm not in forms:
        raise refused(
            f"is ModelOpt's {algorithm or 'without quant_algo'}, which is not supported: served are FP8 and NVFP4"
        )
    ignored = tuple(glob(name) for name in listed(config, "ignore", "exclude_modules"))
    return Quantization("modelopt", (Rule(_ALL, forms[algorithm]),), (*ignored, "gate"))


def gptq(config: Mapping[str, Any]) -> Quantization:
    """AutoGPTQ's and GPTQModel's."""
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
    return Quantization("gptq", (Rule(_ALL, form),), (*listed(config, "modules_to_not_convert"), "gate"), head)


def awq(config: Mapping[str, Any]) -> Quantization:
    """AutoAWQ's layout for its GEMM kernels."""
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise refused(f"has version '{version}', which is not supported: served is gemm")
    bits = _bits(config.get("bits", config.get("w_bit", 4)))
    if bits != 4:
        raise refused(f"has {bits} bits: AWQ is served with 4")
    group = _group(config.get("group_size", config.get("q_group_size", 128)))
    form = GroupFormat("awq", bits, group, symmetric=not config.get("zero_point", True))
    return Quantization("awq", (Rule(_ALL, form),), (*listed(config, "modules_to_not_convert"), "gate"))


def gguf(config: Mapping[str, Any]) -> Quantization:
    """As compute/gguf/model_config.py writes it."""
    types = sorted(config["types"].items(), key=lambda item: -item[1])
    sizes = {name: int(config[name]) for name in ("dense", "packed", "gpu_dense", "coded")}
    form = GgufFormat(tuple((str(name), int(count)) for name, count in types), **sizes)
    return Quantization("gguf", (Rule(_ALL, form),), head=True)


def compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    """compressed-tensors', which llm-compressor writes."""
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


def _compressed_rules(config: Mapping[str, Any]) -> Iterator[Rule]:
    for name, group in config["config_groups"].items():
        stored = group.get("format") or config.get("format", "dense")
        if group.get("output_activations"):
            raise refused(f"quantizes outputs ({name}), which is not supported")
        yield Rule(
            tuple(group["targets"]), _compressed_format(stored, group["weights"], group.get("input_activations"))
        )


def _compressed_format(stored: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Format:
    if (floats := compressed_floats(stored, weights)) is not None:
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


def _usual_strategy(group: int | None) -> str:
    """What the size of a group says where `strategy` is silent."""
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
