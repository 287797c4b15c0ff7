"""Which safetensors files a checkpoint in a directory has. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from quire.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5")


def find_files(directory: Path) -> list[Path]:
    """The weight files of a checkpoint: those of the index, else model.safetensors, else every other one."""
    if (directory / INDEX).is_file():
        return _indexed(directory)
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    found = sorted(p for p in directory.glob("*.safetensors") if not p.name.startswith("consolidated"))
    if found:
        return found
    others = sorted(p.name for pattern in _OTHER_FORMATS for p in directory.glob(pattern))
    if others:
        raise CheckpointError(
            f"{directory} has its weights only as {others[0]}, a format that Quire does not read: use a checkpoint in "
            "safetensors, or convert it with transformers' save_pretrained."
        )
    raise CheckpointError(
        f"{directory} has no *.safetensors file: download the weights, or use --load-format dummy to measure without."
    )


def _indexed(directory: Path) -> list[Path]:
    index = directory / INDEX
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        plain = all(Path(name).name == name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} cannot be read ({error!r}): download it again.") from None
    if not plain or not names:
        raise CheckpointError(f"{index} must name files of its own directory: download it again.")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index} names {len(missing)} files that are not there ({', '.join(missing[:3])}): download them."
        )
    return [directory / name for name in names]
