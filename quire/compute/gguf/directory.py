"""A GGUF model as a directory in Hugging Face layout, so that all that reads a checkpoint reads it.

The directory has files made from the metadata, and links to the model's files. It is written once for each state of the
files, and kept with the user's caches.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from quire.compute.gguf.model_config import model_config
from quire.compute.gguf.model_files import SUFFIX, read_model
from quire.compute.gguf.tokenizer_files import end_ids, tokenizer_files
from quire.errors import CheckpointError
from quire.foundation.config import environment

_log = logging.getLogger(__name__)


def directory_of(paths: Sequence[Path], tokenizer: bool) -> Path:
    """Return the directory of a model.

    Args:
        paths: The model's files, in order.
        tokenizer: Whether the tokenizer is needed; otherwise one that is not served is left out.

    Raises:
        CheckpointError: The files are broken or not served, or the directory cannot be written.
    """
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
    }
    try:
        return files | tokenizer_files(model.metadata)
    except CheckpointError:
        if tokenizer:
            raise
        return files


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
