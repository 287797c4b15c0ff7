"""adapter_config.json: how much an adapter weighs, and what of PEFT's many variants is not served.

Knows nothing about tensors.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError

CONFIG = "adapter_config.json"
_MAX_CONFIG_BYTES = 2**20
_NEUTRAL = frozenset(
    {
        "alora_invocation_string", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying",
        "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform",
        "loftq_config", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision",
        "runtime_config", "target_modules", "target_parameters", "task_type",
    }
)  # fmt: skip
"""Settings of training, and settings that show in the tensors' names."""
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""What `init_lora_weights` may be: other ways to begin training change the base model's weights as well."""
_WHY = {
    "modules_to_save": "whole modules that an adapter brings are not served: merge it into the model",
    "lora_bias": "biases of adapters are not served: merge the adapter into the model",
    "trainable_token_indices": "changed embeddings are not served: merge the adapter into the model",
}


@dataclass(frozen=True)
class AdapterSettings:
    """What adapter_config.json says of the weights.

    Attributes:
        rank, alpha: Of modules that no pattern names.
        ranks, alphas: By pattern of module names.
        rank_stabilised: Whether the scale is alpha / √rank (Kalajdzievski 2023) instead of alpha / rank.
        has_magnitudes: Whether the adapter is one of DoRA (Liu et al. 2024).
    """

    rank: int
    alpha: float
    ranks: dict[str, int] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)
    rank_stabilised: bool = False
    has_magnitudes: bool = False

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.ranks, module, self.rank))

    def scale_of(self, module: str, rank: int) -> float:
        """What B A of a module with this rank is multiplied by."""
        alpha = float(_by_pattern(self.alphas, module, self.alpha))
        return alpha / math.sqrt(rank) if self.rank_stabilised else alpha / rank


def read_settings(directory: Path) -> AdapterSettings:
    """Read the settings in an adapter's directory. Raises CheckpointError if there are none, they are broken, or they
    ask for something that is not served."""
    path = directory / CONFIG
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise CheckpointError(f"{path} is too large for the settings of an adapter.")
        fields = json.loads(path.read_bytes())
    except OSError as error:
        why = f"{CONFIG} cannot be read ({error.strerror})"
        raise CheckpointError(f"{directory} is no adapter of PEFT: {why}.") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not JSON: write the adapter again.") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} is no JSON object: write the adapter again.")
    return _parse(fields, path)


def _parse(fields: dict[str, Any], path: Path) -> AdapterSettings:
    if fields.pop("peft_type", None) != "LORA":
        raise CheckpointError(f"{path}: peft_type is not LORA, and no other kind of adapter is served.")
    if (fields.pop("bias", None) or "none") != "none":
        raise CheckpointError(f"{path}: bias: {_WHY['lora_bias']}.")
    if (begun := fields.pop("init_lora_weights", True)) not in _PLAIN_INITS:
        raise CheckpointError(
            f"{path}: init_lora_weights {begun!r} changes the base model's weights: convert the adapter to a plain one "
            "(PEFT: path_initial_model_for_weight_conversion)."
        )
    try:
        settings = AdapterSettings(
            rank=_positive(fields.pop("r")),
            alpha=_finite(fields.pop("lora_alpha")),
            ranks={_pattern(key): _positive(each) for key, each in (fields.pop("rank_pattern", None) or {}).items()},
            alphas={_pattern(key): _finite(each) for key, each in (fields.pop("alpha_pattern", None) or {}).items()},
            rank_stabilised=bool(fields.pop("use_rslora", False)),
            has_magnitudes=bool(fields.pop("use_dora", False)),
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, re.error) as error:
        raise CheckpointError(f"{path}: r, lora_alpha or a pattern of them is wrong ({error}).") from None
    for name, value in fields.items():
        if value and name not in _NEUTRAL:
            which = f" {value}" if isinstance(value, list) else ""
            why = _WHY.get(name, "it is not served, and would change the result")
            raise CheckpointError(f"{path}: {name}{which}: {why}.")
    return settings


def _by_pattern(values: dict[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of the module's name, as in PEFT."""
    return next((value for key, value in values.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _pattern(key: str) -> str:
    re.compile(key)
    return key


def _positive(value: Any) -> int:
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise ValueError(f"{value!r} is no rank")
    return int(value)


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)
