"""Formats of weights, and which module has which. Plain data, without torch.

A format says how a checkpoint, or --quantization, has the weight of a module. Sources: the safetensors headers and
`quantization_config`s that compressed-tensors, AutoGPTQ and GPTQModel, AutoAWQ, bitsandbytes, AMD's Quark,
transformers' fine-grained fp8 and mxfp4, and NVIDIA's ModelOpt write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from quire.errors import CheckpointError
from quire.models.weights.safetensors_files import text_name

MICROSCALED = 32
"""Columns of a group whose scale is a power of two, in one byte; fewer have e4m3, and a factor for the module."""
_ADVICE = "use the model's bf16 checkpoint, with --quantization fp8 for half of the memory"


@dataclass(frozen=True)
class Fp8Format:
    """8-bit floats, e4m3: weight ≈ scale · codes. Activations are quantized as well, each row with a scale of its own.

    Attributes:
        scales: Whether there is one scale for the tensor, for each output, or for each block.
        block: The rows and columns of a block.
        scale_name: What the checkpoint calls the scales, behind the module's name.
        at_load: Whether the checkpoint has dense weights, which are quantized as they are loaded, output by output.
        input_scale: What the checkpoint calls a fixed scale of activations, if it has one. It is ignored: the rows' own
            scales are at least as exact.
    """

    scales: Literal["tensor", "channel", "block"] = "channel"
    block: tuple[int, int] = (128, 128)
    scale_name: str = "weight_scale"
    at_load: bool = False
    input_scale: str | None = None

    @property
    def name(self) -> str:
        """What the log calls this format."""
        return f"fp8 with scales by {self.scales}"


@dataclass(frozen=True)
class GroupFormat:
    """Integers of 4 or 8 bits: weight = scale · (code - zero), both of `group` columns of an output; dense activations.

    Attributes:
        layout: Whose tensors: gptq, gptq_v2 (zeros stored as they are, not less one), awq, compressed-tensors, or
            bitsandbytes, which has 8 bits and a scale for each output.
        bits: 4 or 8.
        group: The number of columns that share a scale; None: all.
        symmetric: Whether every zero is the middle of the codes.
        reordered: Whether columns belong to groups as `g_idx` says.
    """

    layout: Literal["gptq", "gptq_v2", "awq", "compressed-tensors", "bitsandbytes"]
    bits: int
    group: int | None
    symmetric: bool
    reordered: bool = False

    @property
    def name(self) -> str:
        """What the log calls this format."""
        return f"{self.bits} bits in groups of {self.group or 'all'} columns"


@dataclass(frozen=True)
class Int8Format:
    """8-bit integers: weight = scale · code, a scale for each output or one for all; activations as in Fp8Format."""

    scales: Literal["tensor", "channel"] = "channel"

    @property
    def name(self) -> str:
        """What the log calls this format."""
        return f"int8 with scales by {self.scales}"


@dataclass(frozen=True)
class CodebookFormat:
    """4-bit codes that name one of sixteen values: weight = scale · value; dense activations.

    Attributes:
        layout: Whose tensors; `dense`: the checkpoint has dense weights, which are quantized as they are loaded.
        values: What the codes stand for: nf4, fp4 (bitsandbytes') or e2m1.
        group: The number of columns that share a scale.
        nested: Whether bitsandbytes' scales are quantized as well ("double quantization").
    """

    layout: Literal["bitsandbytes", "mxfp4", "compressed-tensors", "quark", "modelopt", "dense"]
    values: Literal["nf4", "fp4", "e2m1"]
    group: int
    nested: bool = False

    @property
    def at_load(self) -> bool:
        """Whether the checkpoint's weights are dense."""
        return self.layout == "dense"

    @property
    def name(self) -> str:
        """What the log calls this format."""
        return f"4 bits ({self.values}) in groups of {self.group} columns"


@dataclass(frozen=True)
class GgufFormat:
    """The format of a GGUF file's weights, in which each tensor has a type of its own.

    Attributes:
        types: The file's types, each with the number of its tensors.
        dense: How many weights a CPU keeps in the model's dtype.
        packed: Bytes that all other weights take on a CPU, packed for its kernels.
        gpu_dense: How many weights a GPU keeps in the model's dtype.
        coded: Bytes that all other weights take on a GPU.
    """

    types: tuple[tuple[str, int], ...] = ()
    dense: int = 0
    packed: int = 0
    gpu_dense: int = 0
    coded: int = 0

    @property
    def name(self) -> str:
        """What the log calls this format."""
        return ", ".join(f"{name} ({count})" for name, count in self.types)


Format = Fp8Format | GroupFormat | Int8Format | CodebookFormat | GgufFormat


@dataclass(frozen=True)
class Rule:
    """A format and its modules.

    Attributes:
        targets: Names, `re:` and a pattern that a name begins with, or `Linear` for all.
        format: The format of their weights.
        modules: Names of modules, and of those that hold them, such as all experts of a layer; for thousands of them.
    """

    targets: tuple[str, ...]
    format: Format
    modules: frozenset[str] = frozenset()

    def names(self, name: str) -> bool:
        """Say whether the module of this name is one of the rule's."""
        if any(_matches(target, name) for target in self.targets):
            return True
        return bool(self.modules) and any(name[: dot.start()] in self.modules for dot in re.finditer(r"\.|$", name))


@dataclass(frozen=True)
class Quantization:
    """Which modules' weights have which format.

    Attributes:
        method: The value of `quant_method` or --quantization.
        rules: The first rule that names a module counts.
        ignored: Modules with dense weights, as in Rule, or a part of a name that ends at dots.
        head: Whether the head to logits is quantized too.
    """

    method: str
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    head: bool = False

    def renamed(self, older: Sequence[tuple[str, str]]) -> Quantization:
        """Return the same with modules by the names that the model gives them.

        Args:
            older: Beginnings of names in some checkpoints, each with what it stands for.
        """

        def own(name: str) -> str:
            for begin, standard in older:
                for old, new in ((begin, standard), (f"re:{re.escape(begin)}", f"re:{re.escape(standard)}")):
                    if name.startswith(old):
                        return new + name[len(old) :]
            return name

        rules = (
            Rule(tuple(map(own, rule.targets)), rule.format, frozenset(map(own, rule.modules))) for rule in self.rules
        )
        return replace(self, rules=tuple(rules), ignored=tuple(map(own, self.ignored)))

    def format_of(self, name: str) -> Format | None:
        """Of the weight of this module; None: dense."""
        if name.endswith("lm_head") and not self.head:
            return None
        if any(_matches(pattern, name) or f".{pattern}." in f".{name}." for pattern in self.ignored):
            return None
        return next((rule.format for rule in self.rules if rule.names(name)), None)

    def format_of_all(self, names: tuple[str, ...]) -> Format | None:
        """The one format of modules whose weights are stacked.

        Raises:
            CheckpointError: They have several.
        """
        formats = {self.format_of(name) for name in names}
        if len(formats) > 1:
            raise CheckpointError(
                f"{', '.join(names)} are not quantized alike, and Quire multiplies them as one: {_ADVICE}.",
                param="quantization_config",
            )
        return formats.pop()


def listed(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """The modules that the first of these keys lists."""
    found = next((config[key] for key in keys if config.get(key)), ())
    return tuple(text_name(str(name)) or str(name) for name in found)


def glob(name: str) -> str:
    """Turn a name with `*`, as ModelOpt and Quark write them, into a pattern of Rule."""
    return "re:" + name.replace(".", r"\.").replace("*", ".*") + "$" if "*" in name else name


def refused(text: str) -> CheckpointError:
    """Make the error about a `quantization_config` that is not served."""
    return CheckpointError(f"config.json: 'quantization_config' {text}: {_ADVICE}.", param="quantization_config")


def _matches(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target in ("Linear", name)
