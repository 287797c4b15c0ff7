"""The files of one GGUF model, a single one or all parts of a split one, as one set of metadata and tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.compute.gguf.header import GgufTensor, read_header
from quire.errors import CheckpointError, ModelNotFoundError

SUFFIX = ".gguf"
_PART = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True)
class GgufModel:
    """A model's headers.

    Attributes:
        paths: The model's files, in order.
        metadata: The metadata of the first file.
        tensors: The tensors of all files.
    """

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_model(paths: Sequence[Path]) -> GgufModel:
    """Read the headers of a model's files.

    Raises:
        CheckpointError: A file is broken, is no part of this model, or has a tensor that another has too.
    """
    headers = [read_header(path) for path in paths]
    tensors: dict[str, GgufTensor] = {}
    for number, header in enumerate(headers):
        declared = header.metadata.get("split.count", 1)
        if declared not in (0, 1, len(paths)) or header.metadata.get("split.no", number) != number:
            raise CheckpointError(f"{header.path} is not part {number + 1} of {len(paths)}: download the model again.")
        if again := sorted(tensors.keys() & header.tensors.keys()):
            raise CheckpointError(f"{header.path}: '{again[0]}' stands in another part as well: download them again.")
        tensors.update(header.tensors)
    expected = headers[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(f"{paths[0]} declares {expected} tensors, its parts have {len(tensors)}: download them.")
    return GgufModel(tuple(paths), headers[0].metadata, tensors)


def parts_of(path: Path) -> list[Path]:
    """Return all files of the model that a file belongs to.

    Raises:
        CheckpointError: A part is missing.
    """
    paths = [path.with_name(name) for name in part_names(path.name)]
    missing = [each.name for each in paths if not each.is_file()]
    if missing:
        raise CheckpointError(f"{path.parent} lacks {', '.join(missing[:3])}: download all parts of the model.")
    return paths


def part_names(name: str) -> list[str]:
    """Return the names of all files of the model that the file of this name belongs to."""
    part = _PART.match(name)
    if part is None:
        return [name]
    count = int(part["count"])
    return [f"{part['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def choose(names: Sequence[str], quantization: str | None, where: str) -> str:
    """Choose a GGUF file, or the first part of a split model.

    Args:
        names: The names of the files.
        quantization: A word of the name, such as Q4_K_M; None: there is only one model.
        where: The place of the files, for errors.

    Raises:
        ModelNotFoundError: No file or several files fit.
    """
    models = [name for name in sorted(names) if part_names(name)[0] == name and not _is_projector(name)]
    found = models
    if quantization is not None:
        word = re.compile(rf"(?:^|[-._/]){re.escape(quantization)}(?=[-._/]|$)", re.IGNORECASE)
        found = [name for name in models if word.search(name)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(models[:12]) + (", …" if len(models) > 12 else "")
    asked = (
        "" if quantization is None else f", {'several' if found else 'none'} of them with '{quantization}' in the name"
    )
    raise ModelNotFoundError(
        f"{where} has {len(models)} GGUF models ({listed}){asked}: give --gguf-file NAME, or '{where}:Q4_K_M' for the "
        "one with that in its name."
    )


def _is_projector(name: str) -> bool:
    return name.rpartition("/")[2].startswith("mmproj")
