"""Decides which towers for sounds transformers' own modules compute. Does not import torch."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path

from quire.errors import CheckpointError
from quire.models.audio.hearing_spec import HEARS, HearingSpec
from quire.models.config_file import ConfigFile
from quire.models.fallback.spec import describe_hearing

_log = logging.getLogger(__name__)


def read_hearing(directory: Path) -> HearingSpec | None:
    """Return the tower for sounds of a checkpoint; None: it has none, or one that transformers cannot compute."""
    names = ConfigFile(directory / "config.json").get("architectures", [])
    if not isinstance(names, list) or not any(name in HEARS for name in names):
        return None
    try:
        return describe_hearing(directory)
    except CheckpointError as error:
        _warn_once(directory, str(error))
    return None


@lru_cache(maxsize=32)
def _warn_once(directory: Path, why: str) -> None:
    _log.warning("%s: sounds are not served, its text model is: %s", directory, why)
