"""The keys of one config.json, checked as they are read; every error names the file and the key.

Knows nothing about what the keys mean. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError

_NULLABLE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
"""Keys at which null is a value: no window, no bound."""

_OF_ALL = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings", "eos_token_id", "bos_token_id")
"""Keys of a whole model that count for its text model too."""


class ConfigFile:
    """A config.json.

    Raises:
        CheckpointError: The file is missing or is no JSON object.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{file.parent} has no config.json: give --model a directory in Hugging Face layout, or a hub id."
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} cannot be read as JSON ({error}): download it again.") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{file} holds no JSON object: download it again.")
        self._values: dict[str, Any] = values
        self._names: Mapping[str, str] = {}
        self._defaults: Mapping[str, Any] = {}

    def adopt(self, names: Mapping[str, str], defaults: Mapping[str, Any]) -> None:
        """Read on in one architecture's customs: what it calls our keys, and what its silence means."""
        self._names, self._defaults = names, defaults

    def enter_text_config(self, defaults: Mapping[str, Any]) -> None:
        """Read on in `text_config`, the text model's part of one that reads images too.

        Args:
            defaults: What silence means there; files have only what differs from it.
        """
        inner = self._values["text_config"]
        outer = {key: self._values[key] for key in _OF_ALL if self._values.get(key) is not None}
        self._values = {**defaults, **inner, **outer}

    def refused(self, key: str, text: str) -> CheckpointError:
        """An error about `key` in words of its own."""
        return CheckpointError(f"{self._file}: {text}", param=key)

    def wrong(self, key: str, reason: str) -> CheckpointError:
        """The error that says what the file has as `key` and why that does not serve."""
        name = self._names.get(key, key)
        return CheckpointError(f"{self._file}: '{name}' is {self._values.get(name)!r}, it {reason}.", param=name)

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands there. null says that there is no such thing where that can be meant, and elsewhere it
        is as if the key were absent, whose meaning is the architecture's.
        """
        name = self._names.get(key, key)
        value = self._values.get(name)
        if value is not None:
            return value
        return default if key in _NULLABLE and name in self._values else self._defaults.get(key, default)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self.wrong(key, "must be a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive number."""
        return self.positive(key, self.get(key, default))

    def optional_number(self, key: str) -> float | None:
        """A positive number, or None where there is none."""
        value = self.get(key)
        return None if value is None else self.positive(key, value)

    def positive(self, key: str, value: Any, inner: str | None = None) -> float:
        """`value`, of `key` or of its entry `inner`, as a positive finite float."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(key, f"must have a positive number as {inner}" if inner else "must be a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        """One of the choices."""
        value = self.get(key, default)
        if value not in choices:
            raise self.wrong(key, f"is not supported: served are {', '.join(choices)}")
        return str(value)

    def dtype(self, choices: tuple[str, ...]) -> str:
        """`dtype` (transformers 5) or `torch_dtype` (4, whose older files say `torch.bfloat16`)."""
        key = "dtype" if self.get("dtype") is not None else "torch_dtype"
        if isinstance(self.get(key), str):
            self._values[key] = self._values[key].removeprefix("torch.")
        return self.choice(key, choices, "float32")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.wrong(key, "must be a token id or a list of them")
        return tuple(ids)

    def layer_numbers(self, key: str, layers: int) -> frozenset[int]:
        """A list of layer numbers."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(type(i) is int and 0 <= i < layers for i in value):
            raise self.wrong(key, f"must be a list of layer numbers below {layers}")
        return frozenset(value)
