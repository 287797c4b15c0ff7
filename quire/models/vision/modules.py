"""Decides which towers transformers' own modules compute. Does not import torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from quire.errors import CheckpointError
from quire.models.fallback.spec import describe_tower
from quire.models.vision.module_spec import ModuleVisionSpec

_log = logging.getLogger(__name__)
NOT_BUILT = {
    "Gemma3nForConditionalGeneration": "its layers' own inputs (PLE) are not built for images yet",
    "PaliGemmaForConditionalGeneration": "tokens of a prompt see those behind them, which is not built yet",
}
"""Architectures that need more of an image than vectors in place of tokens, and what it is."""


@lru_cache(maxsize=32)
def warn_once(directory: Path, why: str) -> None:
    """Log why a checkpoint's images are not served."""
    _log.warning("%s: images are not served, its text model is: %s", directory, why)


def read_modules(directory: Path, names: Sequence[str]) -> ModuleVisionSpec | None:
    """Return the tower that transformers' modules compute; None: they cannot, or more than vectors is needed."""
    why = next((reason for name, reason in NOT_BUILT.items() if name in names), "")
    try:
        if not why:
            return describe_tower(directory)
    except CheckpointError as error:
        why = str(error)
    warn_once(directory, why)
    return None
