"""Reads and checks the keys of one config.json; every error names the file and the key.

Does not know what the keys mean, and does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError

_NULLABLE = (
    "head_dim", "q_lora_rank", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "scale_depth",
    "dim_model_base",
)  # fmt: skip
"""Keys whose null is a value: no window, no bound, no latent, no factor, or heads that share the hidden width."""

_OF_ALL = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings", "eos_token_id", "bos_token_id")
"""Keys of the whole model that also apply to its text model."""


class ConfigFile:
    """The keys of one config.json.

    Raises:
        CheckpointError: The file is missing, or is not a JSON object.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            has = "only Mistral's params.json" if (file.parent / "params.json").exists() else "no config.json"
            raise CheckpointError(
                f"{file.parent} has {has}: give --model a directory in Hugging Face layout, or a hub id."
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} cannot be read as JSON ({error}): download it again.") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{file} holds no JSON object: download it again.")
        self._values: dict[str, Any] = values
        if values.get("quantization_config") is None:
            self._values["quantization_config"] = values.get("quantization") or _modelopt_settings(file.parent)
        self._names: Mapping[str, str | tuple[str, ...]] = {}
        self._defaults: Mapping[str, Any] = {}

    @property
    def directory(self) -> Path:
        """The directory that the file lies in."""
        return self._file.parent

    def adopt(self, names: Mapping[str, str | tuple[str, ...]], defaults: Mapping[str, Any]) -> None:
        """Apply an architecture's names of Llama's keys, and its defaults for missing keys."""
        self._names, self._defaults = names, defaults

    def enter_text_config(self, defaults: Mapping[str, Any]) -> None:
        """Continue in `text_config`, which describes the text model of a model that also reads images.

        Args:
            defaults: Values of keys that `text_config` leaves out.
        """
        inner = self._values["text_config"]
        outer = {key: self._values[key] for key in _OF_ALL if self._values.get(key) is not None}
        self._values = {**defaults, **inner, **outer}

    def _name(self, key: str) -> str:
        """Return the file's name of a key; of several that it may have, the first one that is there."""
        names = self._names.get(key, key)
        if isinstance(names, str):
            return names
        return next((name for name in names if self._values.get(name) is not None), names[0])

    def refused(self, key: str, text: str) -> CheckpointError:
        """Make an error about `key` with this text."""
        return CheckpointError(f"{self._file}: {text}", param=key)

    def wrong(self, key: str, reason: str) -> CheckpointError:
        """Make an error that tells the value of `key` and why it is not served."""
        name = self._name(key)
        return CheckpointError(f"{self._file}: '{name}' is {self._values.get(name)!r}, it {reason}.", param=name)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key.

        Where null has a meaning, a null gives `default`; elsewhere it counts as a missing key.
        """
        name = self._name(key)
        value = self._values.get(name)
        if value is not None:
            return value
        return default if key in _NULLABLE and name in self._values else self._defaults.get(key, default)

    def count(self, key: str, default: int | None = None) -> int:
        """Read a positive integer. In place of the number of layers, there may be a list that has them all."""
        value = self.get(key, default)
        if key == "num_hidden_layers" and isinstance(value, list):
            value = len(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self.wrong(key, "must be a positive integer")
        return value

    def count_of_all(self, key: str, default: int | None = None) -> int:
        """Read a positive integer, or a list that has it once for each layer."""
        value = self.get(key, default)
        if isinstance(value, list):
            if not value or len(set(map(str, value))) > 1:
                raise self.wrong(key, "is not supported: it must be the same for all layers")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self.wrong(key, "must be a positive integer")
        return value

    def natural(self, key: str, default: int) -> int:
        """Read an integer of at least 0."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise self.wrong(key, "must be an integer of at least 0")
        return value

    def number(self, key: str, default: float) -> float:
        """Read a positive number."""
        return self.positive(key, self.get(key, default))

    def optional_number(self, key: str) -> float | None:
        """Read a positive number; None if the key is missing or null."""
        value = self.get(key)
        return None if value is None else self.positive(key, value)

    def positive(self, key: str, value: Any, inner: str | None = None) -> float:
        """Return `value`, which is the value of `key` or of its entry `inner`, as a positive finite float."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(key, f"must have a positive number as {inner}" if inner else "must be a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        value = self.get(key, default)
        if value not in choices:
            raise self.wrong(key, f"is not supported: served are {', '.join(choices)}")
        return str(value)

    def dtype(self, choices: tuple[str, ...]) -> str:
        """Read `dtype` (transformers 5) or `torch_dtype` (transformers 4, whose older files write `torch.bfloat16`)."""
        key = "dtype" if self.get("dtype") is not None else "torch_dtype"
        if isinstance(self.get(key), str):
            self._values[key] = self._values[key].removeprefix("torch.")
        return self.choice(key, choices, "float32")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Read a token id or a list of token ids."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.wrong(key, "must be a token id or a list of them")
        return tuple(ids)

    def layer_numbers(self, key: str, layers: int) -> frozenset[int]:
        """Read a list of layer numbers."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(type(i) is int and 0 <= i < layers for i in value):
            raise self.wrong(key, f"must be a list of layer numbers below {layers}")
        return frozenset(value)


def _modelopt_settings(directory: Path) -> dict[str, Any] | None:
    """Return what hf_quant_config.json says, where older releases of ModelOpt write what newer ones write as
    `quantization_config`; None: there is no such file.

    Raises:
        CheckpointError: The file cannot be read; without it, codes would be taken for weights.
    """
    file = directory / "hf_quant_config.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))["quantization"]
        return {**settings, "quant_method": "modelopt"} if settings.get("quant_algo") else None  # else only the cache
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} does not say how the weights are quantized ({error!r}): download it again."
        ) from None


def processor_settings(directory: Path, part: str) -> dict[str, Any]:
    """Return the settings of a part of a checkpoint's processor: those in processor_config.json, or else
    preprocessor_config.json; empty if there are none, so that the family's own apply.

    Args:
        directory: Where the checkpoint's files lie.
        part: Its name in processor_config.json: "image_processor", "video_processor" or "feature_extractor".
    """
    own = (("video_preprocessor_config.json", None),) if part == "video_processor" else ()
    for name, key in (("processor_config.json", part), *own, ("preprocessor_config.json", None)):
        try:
            found = json.loads((directory / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        settings = found.get(key) if isinstance(found, dict) and key else found
        if isinstance(settings, dict):
            return settings
    return {}
