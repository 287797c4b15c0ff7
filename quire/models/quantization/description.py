"""What quantizes which module, as plain data. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import CheckpointError
from quire.models.quantization.formats import Format
from quire.models.weights.headers import text_name

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
