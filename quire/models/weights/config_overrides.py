"""--hf-overrides: a directory like the model's, whose config.json has other values."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError, reason
from quire.foundation.config import environment

CONFIG = "config.json"
_SUFFIX, _QUANTIZATION = "_config", "quantization_config"


def overridden(directory: Path, overrides: Mapping[str, Any]) -> Path:
    """The directory of a model with these values in its config.json, kept in the user's cache: all other files are
    links. Without any it is the model's own.

    Raises:
        CheckpointError: config.json cannot be read, or the directory cannot be written.
    """
    if not overrides:
        return directory
    cache = environment.overrides_cache()
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        written = json.dumps(merged(config, overrides), indent=2).encode()
        identity = hashlib.sha256(repr((str(directory.resolve()), written)).encode()).hexdigest()[:16]
        target = cache / f"{directory.name[:80]}-{identity}"
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=cache) as place:
            made = Path(place) / "model"
            made.mkdir()
            (made / CONFIG).write_bytes(written)
            for file in directory.iterdir():
                if file.name != CONFIG:
                    (made / file.name).symlink_to(file.resolve())
            if not target.is_dir():
                _put(made, target)
    except (OSError, ValueError, AttributeError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"--hf-overrides cannot be applied to {directory / CONFIG}: {why}.") from None
    return target


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with other values. A part for itself (`text_config`) keeps its other values; all else is replaced.

    Values of the rotation may be given by the names of transformers 4, whichever the file has.
    """
    found = dict(config)
    for name, value in overrides.items():
        own = found.get(name)
        if name.endswith(_SUFFIX) and name != _QUANTIZATION and isinstance(own, Mapping) and isinstance(value, Mapping):
            value = merged(own, value)
        found[name] = value
    if "classifier_from_token" in overrides and "architectures" in config:
        found["architectures"] = config["architectures"]  # vLLM's commands name a class that it makes of this one
    if "rope_parameters" not in overrides and overrides.keys() & {"rope_scaling", "rope_theta"}:
        _merge_rotation(found, overrides)
    return found


def _merge_rotation(found: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Write values by the names of transformers 4 into `rope_parameters`, where the file has that of transformers 5.
    Raises ValueError if it has several, for different layers."""
    own = found.get("rope_parameters")
    if not isinstance(own, Mapping):
        return
    if any(isinstance(value, Mapping) for value in own.values()):
        raise ValueError("its rope_parameters differ by layer, so give those whole")
    values = dict(own)
    if "rope_scaling" in overrides:
        kept = {name: own[name] for name in ("rope_theta", "partial_rotary_factor") if name in own}
        values = kept | dict(overrides["rope_scaling"] or {"rope_type": "default"})
    if "rope_theta" in overrides:
        values["rope_theta"] = overrides["rope_theta"]
    found.pop("rope_scaling", None)
    found["rope_parameters"] = values


def _put(made: Path, target: Path) -> None:
    try:
        os.rename(made, target)
    except OSError:
        if not target.is_dir():  # another process was faster
            raise
