"""Whether a start like this one has left all its kernels on disk before, so that nobody has to be ready to compile.

A file in Triton's cache says so, and is gone with it. Its name stands for the settings, and for the sources of kernels
and Triton as they are. It may be wrong, because the card is another one or somebody tidied up: then threads compile,
which takes that start longer, and nothing else happens. Imports no Triton.
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
    """The file, there once a start with these settings has come to its end.

    Args:
        cache: Triton's directory.
        settings: Whatever decides which kernels there are, the environment too, but for sources and Triton.
    """
    digest = hashlib.sha256(settings)
    triton = util.find_spec("triton")  # whatever its package is called
    for path in (*sorted(_SOURCES.rglob("*.py")), *([Path(triton.origin)] if triton and triton.origin else ())):
        with suppress(OSError):  # an editor's file that is gone again
            status = path.stat()
            digest.update(f"{path} {status.st_mtime_ns} {status.st_size}\n".encode())
    return cache / f"quire-start-{digest.hexdigest()[:32]}"


def is_there(trace: Path) -> bool:
    """Whether an earlier start has left it. Where nobody may look, it is not."""
    return os.path.exists(trace)


def leave(trace: Path) -> None:
    """Let the next start know."""
    try:
        trace.touch()
    except OSError as error:
        _log.debug("kernels     nobody is told that all are on disk: %s", error)
