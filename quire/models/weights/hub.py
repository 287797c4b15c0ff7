"""Finds the directory of a model that --model names by a path, the built-in model's name, or a hub id.

A GGUF model's directory has its settings and links to its files; `DIR:Q4_K_M` and `org/name:Q4_K_M` mean the GGUF model
with that in its name. Imports no torch. Only files that serving needs are fetched: never code, never pickled weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.compute.gguf.model_files import SUFFIX, choose, directory_of, part_names, parts_of
from quire.errors import ConfigError, ModelNotFoundError, reason
from quire.foundation.config import BUILTIN_MODEL

_WITH_QUANTIZATION = re.compile(r"^(?P<model>.+):(?P<quantization>[A-Za-z0-9_.-]+)$")
Download = Callable[[str, tuple[str, ...]], Path]
"""A hub id and patterns of files → the directory where these are."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json")
PATTERNS = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.txt",
    *(name for name in TOKENIZER_FILES if name.endswith(".model")),
)
WITHOUT_WEIGHTS = tuple(p for p in PATTERNS if p != "*.safetensors")
_LONGEST_SHOWN = 80


@dataclass(frozen=True)
class GgufChoice:
    """Which of several GGUF models is meant: `file` is --gguf-file, the name of the model's (first) file, and
    `tokenizer` tells whether its tokenizer is wanted too."""

    file: str | None = None
    tokenizer: bool = True


def find_gguf_model(model: str, choice: GgufChoice, download: Download) -> Path | None:
    """Find the directory of the GGUF model that is meant; None if another format is meant. Raises ModelNotFoundError,
    CheckpointError or ConfigError if the model is not there, broken, or not the only one."""
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
    """Find the GGUF model in a directory; None if it has weights of another format, or none."""
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


@dataclass(frozen=True)
class HubAccess:
    """How files are fetched: with a token for gated and private models, from a `revision` (branch, tag or commit), into
    `download_dir`; None for huggingface_hub's own cache."""

    token: str | None = None
    download_dir: str | None = None
    revision: str | None = None


def resolve(
    model: str,
    revision: str | None = None,
    token: str | None = None,
    download_dir: str | None = None,
    *,
    weights: bool = True,
    gguf: GgufChoice | None = None,
    asked: str = "--model",
) -> Path:
    """Find the directory of a model, and download it if it is a hub's.

    Args:
        model: A directory, a GGUF file, `quill`, or a hub id such as `org/name`.
        revision, token, download_dir: As in HubAccess.
        weights: Whether weight files are wanted too (a tokenizer alone needs none).
        gguf: Which GGUF model is meant, if there are several.
        asked: What named the model, for messages.

    Raises:
        ModelNotFoundError: The model is neither here nor on the hub, or the hub refuses it; the message says which and
            what to do.
        CheckpointError: A GGUF file is broken or not served.
    """
    path = _reachable(Path(model).expanduser(), model, asked)
    access = HubAccess(token, download_dir, revision)

    def fetch(name: str, patterns: tuple[str, ...]) -> Path:
        return download(name, access, patterns, asked)

    if not weights and any((path / name).is_file() for name in TOKENIZER_FILES):
        return path
    gguf = gguf or GgufChoice()
    if (model != BUILTIN_MODEL or gguf.file) and (found := find_gguf_model(model, gguf, fetch)):
        return found
    if path.is_dir():
        return path
    if model == BUILTIN_MODEL:
        from quire import builtin

        return builtin.path(model)
    if path.exists():
        raise ModelNotFoundError(f"{model} is a file: give {asked} the directory of the checkpoint, or a GGUF file.")
    return fetch(model, PATTERNS if weights else WITHOUT_WEIGHTS)


def _reachable(path: Path, model: str, asked: str) -> Path:
    """Return the path, whether or not it exists. Raises ModelNotFoundError if that cannot be found out."""
    try:
        path.exists()
    except OSError as error:
        shown = model if len(model) <= _LONGEST_SHOWN else f"{model[:_LONGEST_SHOWN]}…"
        raise ModelNotFoundError(f"{asked} {shown} cannot be looked for: {reason(error)}.") from None
    return path


def download(model: str, access: HubAccess, patterns: tuple[str, ...], asked: str = "--model") -> Path:
    """Download a hub id's files of these patterns, and return their directory; raises as `resolve` does."""
    # huggingface_hub takes 0.3 s to import: only those who download pay it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(
            snapshot_download(
                model,
                revision=access.revision,
                token=access.token,
                cache_dir=access.download_dir,
                allow_patterns=list(patterns),
            )
        )
    except HFValidationError:
        cause = f"is neither a directory nor a hub id (org/name): check {asked}"
    except GatedRepoError:
        cause = "is gated on the hub: accept its conditions on its page, then give --hf-token or set HF_TOKEN"
    except RepositoryNotFoundError:
        cause = "is neither a directory here nor a model on the hub (if it is private, give --hf-token): check its name"
    except RevisionNotFoundError:
        cause = f"has no revision '{access.revision}' on the hub: check --revision"
    except LocalEntryNotFoundError:
        cause = f"is not in the local cache and {_why_offline()}, or give a directory as {asked}"
    except HfHubHTTPError as error:
        cause = f"could not be fetched from the hub ({first_line(error)}): try again"
    except OSError as error:
        cause = f"could not be fetched from the hub ({first_line(error)}): check the network and the disk"
    raise ModelNotFoundError(f"'{model}' {cause}.")


def _why_offline() -> str:
    from huggingface_hub.constants import is_offline_mode

    if is_offline_mode():
        return "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so the hub is not asked: unset it"
    return "the hub cannot be reached: connect"


def first_line(error: Exception) -> str:
    """The first line of an error's text, or the name of its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
