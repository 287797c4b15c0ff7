"""Reads and writes a marker in Triton's cache: a start with these settings has left all its kernels on disk.

With the marker, no processes need to prepare to compile. It is an empty file whose name stands for the settings, the
sources of kernels, the tables of their configs and Triton. It may be wrong, because the GPU is another one or somebody
removed kernels: then threads compile, and the start takes longer. This module does not import Triton.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from importlib import util
from pathlib import Path

_SOURCES = Path(__file__).resolve().parent.parent
_log = logging.getLogger(__name__)


def marker_path(cache: Path, settings: bytes) -> Path:
    """Return the path of the marker in Triton's cache. `settings` decide, besides the environment, sources, tables and
    Triton, which kernels exist."""
    digest = hashlib.sha256(settings)
    triton = util.find_spec("triton")  # whatever its package is called
    files = sorted(path for path in _SOURCES.rglob("*") if path.suffix in (".py", ".json"))
    for path in (*files, *([Path(triton.origin)] if triton and triton.origin else ())):
        with suppress(OSError):  # an editor's file that is gone again
            status = path.stat()
            digest.update(f"{path} {status.st_mtime_ns} {status.st_size}\n".encode())
    return cache / f"quire-start-{digest.hexdigest()[:32]}"


def is_written(marker: Path) -> bool:
    return os.path.exists(marker)


def write(marker: Path) -> None:
    try:
        marker.touch()
    except OSError as error:
        _log.debug("kernels     the next start is not told that all are on disk: %s", error)
