"""What quantizes which module: a checkpoint's `quantization_config`, and --quantization, read into plain data.

Whatever is not served is refused here by name, before any weight is read. Imports no torch.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import CheckpointError, ConfigError
from quire.models.quantization.formats import CodebookFormat, Format, Fp8Format
from quire.models.weights.text_names import text_name

PARSERS: dict[str, str] = {
    "fp8": "quire.models.quantization.parsers:fp8",
    "compressed-tensors": "quire.models.quantization.parsers:compressed_tensors",
    "gptq": "quire.models.quantization.parsers:gptq",
    "awq": "quire.models.quantization.parsers:awq",
    "bitsandbytes": "quire.models.quantization.codebook_parsers:bitsandbytes",
    "mxfp4": "quire.models.quantization.codebook_parsers:mxfp4",
    "quark": "quire.models.quantization.codebook_parsers:quark",
    "gguf": "quire.models.quantization.parsers:gguf",
    "modelopt": "quire.models.quantization.parsers:modelopt",
}
"""By `quant_method`: what reads the rest of a `quantization_config`."""
_ALIASES = {"compressed_tensors": "compressed-tensors", "awq_marlin": "awq", "gptq_marlin": "gptq"}
"""Names that vLLM's users give to kernels, not formats."""
_ADVICE = "use the model's bf16 checkpoint, with --quantization fp8 for half of the memory"


@dataclass(frozen=True)
class Rule:
    """A format and the modules that have it.

    Attributes:
        targets: Names of modules, `re:` and a pattern that a name begins with, or `Linear` for all.
    """

    targets: tuple[str, ...]
    format: Format


@dataclass(frozen=True)
class Quantization:
    """Which modules' weights have which format.

    Attributes:
        method: As `quant_method` or --quantization says it.
        rules: The first one that names a module counts.
        ignored: Modules with dense weights; as in Rule, or a part of a name that ends at dots.
        head: Whether the head to logits is among the modules.
    """

    method: str
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    head: bool = False

    def format_of(self, name: str) -> Format | None:
        """Of the weight of this module; None: dense."""
        if name.endswith("lm_head") and not self.head:
            return None
        if any(_matches(pattern, name) or f".{pattern}." in f".{name}." for pattern in self.ignored):
            return None
        return next((r.format for r in self.rules if any(_matches(target, name) for target in r.targets)), None)

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


AT_LOAD: dict[str, Quantization] = {
    "fp8": Quantization("fp8", (Rule(("Linear",), Fp8Format(at_load=True)),), ignored=("gate",)),
    "bitsandbytes": Quantization(
        "bitsandbytes", (Rule(("Linear",), CodebookFormat("dense", "nf4", 64)),), ignored=("gate",)
    ),
}
"""What --quantization makes of dense weights; routers of experts stay as they are."""


def read_quantization(described: object, asked: str | None) -> Quantization | None:
    """What quantizes a model's weights.

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
    method = str(described.get("quant_method", "unknown")).lower()
    method = _ALIASES.get(method, method)
    if method not in PARSERS:
        raise refused(f"has quant_method '{method}', which is not supported: served are {', '.join(PARSERS)}")
    module, name = PARSERS[method].split(":")
    parse: Callable[[Mapping[str, Any]], Quantization] = getattr(importlib.import_module(module), name)
    try:
        return parse(_without_nulls(described))
    except (TypeError, ValueError, AttributeError, KeyError, re.error) as error:
        raise refused(f"cannot be read as {method} writes it ({error!r})") from None


def _without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without keys whose value is null, at any depth: they are as if they were absent."""
    return {
        key: _without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value is not None
    }


def listed(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """The modules that the first of these keys lists."""
    found = next((config[key] for key in keys if config.get(key)), ())
    return tuple(text_name(str(name)) or str(name) for name in found)


def glob(name: str) -> str:
    """A name of modules with `*` in it, as ModelOpt and Quark write them, as a pattern."""
    return "re:" + name.replace(".", r"\.").replace("*", ".*") + "$" if "*" in name else name


def refused(text: str) -> CheckpointError:
    """The error about a `quantization_config` that is not served."""
    return CheckpointError(f"config.json: 'quantization_config' {text}: {_ADVICE}.", param="quantization_config")


def _matches(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target in ("Linear", name)
