"""`--config file.yaml`: a command's flags in a file, without their dashes."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import ConfigError, did_you_mean, reason


def read_flags(path: str, known: Collection[str]) -> list[str]:
    """The file's settings as flags: `max-num-seqs: 8` (or with underscores) becomes `--max-num-seqs=8`.

    Args:
        path: A YAML file with a mapping.
        known: The command's names, with underscores.

    Raises:
        ConfigError: The file cannot be read, or a key is not known; the closest known one is suggested.
    """
    try:
        content = msgspec.yaml.decode(Path(path).read_bytes())
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {reason(error)}.", param="config") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}.", param="config") from error
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold 'name: value' lines.", param="config")
    return [flag for key, value in content.items() for flag in _flag(path, str(key), value, known)]


def _flag(path: str, key: str, value: Any, known: Collection[str]) -> list[str]:
    name = key.replace("-", "_")
    if name not in known:
        hint = did_you_mean(name, known).replace("_", "-")
        raise ConfigError(f"{path}: '{key}' is not a setting of this command.{hint}", param=name)
    flag = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}={value if isinstance(value, str) else json.dumps(value)}"]
