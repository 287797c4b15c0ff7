"""The files of one GGUF model, a single one or all parts of a split one, and the model as a directory in Hugging Face
layout, so that all that reads a checkpoint reads it.

The directory has files made from the metadata, and links to the model's files. It is written once for each state of the
files, and kept with the user's caches."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.compute.gguf.header import GgufModel, GgufTensor, read_header
from quire.compute.gguf.model_config import model_config
from quire.compute.gguf.tokenizer_files import end_ids, tokenizer_files
from quire.errors import CheckpointError, ModelNotFoundError
from quire.foundation.config import environment

SUFFIX = ".gguf"
_PART = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_POOLING: dict[object, str] = {1: "mean", 2: "cls", 3: "lasttoken"}
"""Pooling modes by the format's numbers."""
_log = logging.getLogger(__name__)


def read_model(paths: Sequence[Path]) -> GgufModel:
    """Read the headers of a model's files. Raises CheckpointError if a file is broken, is no part of this model, or has
    a tensor that another has too."""
    headers = [read_header(path) for path in paths]
    tensors: dict[str, GgufTensor] = {}
    for number, header in enumerate(headers):
        declared = header.metadata.get("split.count", 1)
        if declared not in (0, 1, len(paths)) or header.metadata.get("split.no", number) != number:
            raise CheckpointError(
                f"{paths[number]} is not part {number + 1} of {len(paths)}: download the model again."
            )
        if again := sorted(tensors.keys() & header.tensors.keys()):
            raise CheckpointError(f"{paths[number]}: '{again[0]}' stands in another part as well: download them again.")
        tensors.update(header.tensors)
    expected = headers[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(f"{paths[0]} declares {expected} tensors, its parts have {len(tensors)}: download them.")
    return GgufModel(tuple(paths), headers[0].metadata, tensors)


def parts_of(path: Path) -> list[Path]:
    """Return all files of the model that a file belongs to. Raises CheckpointError if a part is missing."""
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
    """Choose a GGUF file, or the first part of a split model, by a word of the name such as Q4_K_M; with None there is
    only one model. Raises ModelNotFoundError, which says `where` the files are, if no file or several files fit."""
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


def directory_of(paths: Sequence[Path], tokenizer: bool) -> Path:
    """Return the directory of a model, whose files `paths` are in order. A `tokenizer` that is not served is left out
    if it is not needed. Raises CheckpointError if files are broken or not served, or the directory cannot be
    written."""
    cache = environment.gguf_cache()
    try:
        target = cache / f"{paths[0].stem[:80]}-{_identity(paths, tokenizer)}"
        if target.is_dir():
            return target
        files = _contents(paths, tokenizer)
        cache.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache)
        with tempfile.TemporaryDirectory(prefix=".", dir=cache) as place:
            written = Path(place) / "model"
            written.mkdir()
            for name, content in files.items():
                (written / name).parent.mkdir(exist_ok=True)
                (written / name).write_bytes(content)
            for path in paths:
                (written / path.name).symlink_to(path.resolve())  # a hub's cache has links with better names
            _put(written, target)
    except OSError as error:
        raise CheckpointError(
            f"{paths[0]}: its settings cannot be kept in {cache} ({error}): set XDG_CACHE_HOME to a place that can be "
            "written."
        ) from None
    _log.info("gguf        settings and tokenizer are kept in %s", target)
    return target


def _contents(paths: Sequence[Path], tokenizer: bool) -> dict[str, bytes]:
    model = read_model(paths)
    config = model_config(model)
    config |= {"eos_token_id": end_ids(model.metadata) or config.get("eos_token_id", [])}
    files = {
        "config.json": _dumped(config),
        "generation_config.json": _dumped({"eos_token_id": config["eos_token_id"]}),
        **_pooling_files(model, config),
    }
    try:
        return files | tokenizer_files(model.metadata)
    except CheckpointError:
        if tokenizer:
            raise
        return files


def _pooling_files(model: GgufModel, config: dict[str, Any]) -> dict[str, bytes]:
    """Return sentence-transformers' files of an embedding model; none if the file does not say how states are pooled.

    Embeddings are normalised, as llama.cpp does it; the file does not say so.
    """
    mode = _POOLING.get(model.metadata.get(f"{model.metadata.get('general.architecture')}.pooling_type"))
    if mode is None:
        return {}
    kinds = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    pooling = {"pooling_mode": mode, "embedding_dimension": config.get("hidden_size")}
    return {"modules.json": json.dumps(modules).encode(), "1_Pooling/config.json": _dumped(pooling)}


def _identity(paths: Sequence[Path], tokenizer: bool) -> str:
    """Return a name that changes with the files and with the code that reads them."""
    facts = [
        (path.name, str(path.resolve()), (s := path.stat()).st_size, s.st_mtime_ns, s.st_ctime_ns) for path in paths
    ]
    code = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(repr((facts, tokenizer, code)).encode()).hexdigest()[:16]


def _put(written: Path, target: Path) -> None:
    try:
        os.rename(written, target)
    except OSError:
        if not target.is_dir():
            raise


def _remove_abandoned(cache: Path) -> None:
    for directory in cache.iterdir():
        links = list(directory.glob(f"*{SUFFIX}"))
        if links and not any(link.exists() for link in links):
            shutil.rmtree(directory, ignore_errors=True)


def _dumped(value: object) -> bytes:
    return json.dumps(value, indent=2).encode()
