"""From what --model and --gguf-file say to the files of one GGUF model: a path, a directory with several, or a hub id.

`DIR:Q4_K_M` and `org/name:Q4_K_M` mean the model with that in its name. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.compute.gguf.model_files import SUFFIX, choose, directory_of, part_names, parts_of
from quire.errors import ConfigError, ModelNotFoundError

_WITH_QUANTIZATION = re.compile(r"^(?P<model>.+):(?P<quantization>[A-Za-z0-9_.-]+)$")
Download = Callable[[str, tuple[str, ...]], Path]
"""A hub id and patterns of files → the directory where these are."""


@dataclass(frozen=True)
class GgufChoice:
    """Which GGUF model of several, and what of it.

    Attributes:
        file: --gguf-file, the name of the model's (first) file.
        tokenizer: Its tokenizer is wanted too.
    """

    file: str | None = None
    tokenizer: bool = True


def find_gguf_model(model: str, choice: GgufChoice, download: Download) -> Path | None:
    """The directory of the GGUF model that is meant; None: none is.

    Raises:
        ModelNotFoundError, CheckpointError, ConfigError: It is not there, broken, or not the only one.
    """
    file = _find_file(model, choice.file, download)
    return None if file is None else directory_of(parts_of(file), choice.tokenizer)


def _find_file(model: str, wanted: str | None, download: Download) -> Path | None:
    path = Path(model).expanduser()
    if path.is_file() and path.suffix.lower() == SUFFIX:
        if wanted not in (None, path.name):
            raise ConfigError(f"--gguf-file {wanted}: --model is a file already: leave it out.", param="gguf_file")
        return path
    if path.is_dir():
        return _in_directory(path, model, wanted)
    if wanted is not None:
        return download(model, tuple(part_names(wanted))) / wanted
    named = _WITH_QUANTIZATION.match(model)
    if named is None or path.exists():
        return None
    name, quantization = named["model"], named["quantization"]
    directory = Path(name).expanduser()
    if not directory.is_dir():
        spellings = dict.fromkeys((quantization, quantization.upper(), quantization.lower()))
        patterns = [f"*{each}{end}" for each in spellings for end in (SUFFIX, f"-*{SUFFIX}", f"/*{SUFFIX}")]
        directory = download(name, tuple(patterns))
    names = _names(directory)
    if not names:
        raise ModelNotFoundError(f"{name} has no GGUF file with '{quantization}' in its name: check which it has.")
    return directory / choose(names, quantization, name)


def _in_directory(directory: Path, model: str, wanted: str | None) -> Path | None:
    """A directory with weights of another format, or without any, is left to others."""
    if wanted is not None:
        if not (directory / wanted).is_file():
            raise ModelNotFoundError(f"--gguf-file {wanted}: {model} has no such file: check its name.")
        return directory / wanted
    names = sorted(path.name for path in directory.glob(f"*{SUFFIX}"))
    if not names or ((directory / "config.json").exists() and any(directory.glob("*.safetensors"))):
        return None
    return directory / choose(names, None, model)


def _names(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob(f"*{SUFFIX}"))
