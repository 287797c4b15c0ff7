"""Makes a ModelSpec of a model that transformers computes, so that memory and steps are planned as for any other.

Does not import torch: where a process has none, another one looks at the model.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quire.errors import CheckpointError, ConfigError
from quire.foundation.config import environment
from quire.models.audio.hearing_spec import HearingSpec
from quire.models.fallback.description import Description
from quire.models.families.family import Family
from quire.models.layer_spec import AttentionSpec, LayerSpec, MlpSpec, NormSpec
from quire.models.vision.module_spec import ModuleVisionSpec

_INSPECTION = "quire.models.fallback.inspection"
_TOWER_INSPECTION = "quire.models.fallback.tower_inspection"
_AUDIO_INSPECTION = "quire.models.fallback.audio_inspection"
_TOWER_FILES = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)
_SECONDS = 600
_FORMAT = 7
"""Changes with what a description says, or how it is found."""
DEFAULT_MAX_MODEL_LEN = 2048
"""Longest sequence where config.json has no limit."""
FAMILY = Family(decoder="quire.models.fallback.decoder:FallbackDecoder")
WHOLE = Family(decoder="quire.models.fallback.encoder:FallbackEncoder")
"""Models that make vectors or values of whole texts."""
_log = logging.getLogger(__name__)
_Found = TypeVar("_Found", Description, ModuleVisionSpec, HearingSpec)


def is_installed() -> bool:
    """Whether transformers can be imported."""
    return importlib.util.find_spec("transformers") is not None


def describe(directory: Path, architecture: str) -> Description:
    """Describe a checkpoint's model, as it was described before if nothing has changed.

    Raises:
        ConfigError: transformers is not installed.
        CheckpointError: transformers cannot serve the model either.
    """
    if not is_installed():
        raise ConfigError(
            f"{architecture} is served by transformers' own modules, and transformers is not installed: "
            "pip install 'quire[transformers]'.",
            param="model_impl",
        )
    found: Description = _describe(directory.resolve(), _digest(directory, ("config.json",)), _INSPECTION, Description)
    return found


def describe_tower(directory: Path) -> ModuleVisionSpec:
    """Describe the tower of a checkpoint that transformers' modules compute, as it was described before if nothing has
    changed.

    Raises:
        CheckpointError: transformers is not installed, or cannot compute it; the message says why.
    """
    if not is_installed():
        raise CheckpointError("transformers computes it, and is not installed: pip install 'quire[transformers]'")
    if not any((directory / name).is_file() for name in _TOWER_FILES[1:3]):
        raise CheckpointError("the checkpoint has no image processor: download its preprocessor_config.json")
    return _tower(directory, _TOWER_INSPECTION, ModuleVisionSpec)


def describe_hearing(directory: Path) -> HearingSpec:
    """Describe the tower for sounds of a checkpoint, as it was described before if nothing has changed.

    Raises:
        CheckpointError: transformers is not installed, or cannot compute it; the message says why.
    """
    if not is_installed():
        raise CheckpointError("transformers computes it, and is not installed: pip install 'quire[transformers]'")
    return _tower(directory, _AUDIO_INSPECTION, HearingSpec)


def _tower(directory: Path, inspection: str, kind: type[_Found]) -> _Found:
    digest = _digest(directory, (*_TOWER_FILES, inspection))
    found = _tower_or_error(directory.resolve(), digest, inspection)
    if isinstance(found, CheckpointError):
        raise found
    assert isinstance(found, kind)
    return found


@lru_cache(maxsize=32)
def _tower_or_error(directory: Path, digest: str, inspection: str) -> ModuleVisionSpec | HearingSpec | CheckpointError:
    kind: Any = HearingSpec if inspection == _AUDIO_INSPECTION else ModuleVisionSpec
    try:
        found: ModuleVisionSpec | HearingSpec = _describe(directory, digest, inspection, kind)
    except CheckpointError as error:
        return error
    return found


def _digest(directory: Path, names: tuple[str, ...]) -> str:
    files = [path.read_bytes() for name in names if (path := directory / name).is_file()]
    versions = f"{_FORMAT} {version('transformers')}".encode()
    return hashlib.sha256(b"".join([" ".join(names).encode(), *files, versions])).hexdigest()


@lru_cache(maxsize=32)
def _describe(directory: Path, digest: str, inspection: str, kind: type[_Found]) -> _Found:
    kept = environment.fallback_cache() / f"{digest[:40]}.json"
    try:
        return replace(msgspec.json.decode(kept.read_bytes(), type=kind), directory=str(directory))
    except (OSError, msgspec.MsgspecError):
        pass
    if "torch" in sys.modules:
        found: _Found = importlib.import_module(inspection).describe(directory)
    else:
        found = _describe_elsewhere(directory, inspection, kind)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_bytes(msgspec.json.encode(found))
        partial.replace(kept)
    except OSError as error:
        _log.debug("%s cannot be kept: %s", kept, error)
    return found


def _describe_elsewhere(directory: Path, inspection: str, kind: type[_Found]) -> _Found:
    """Describe a model in another process."""
    command = [sys.executable, "-m", inspection, str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
        answer = json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        raise CheckpointError(f"{directory}: transformers could not be asked about it ({error}).") from None
    if "error" in answer:
        raise CheckpointError(answer["error"])
    return msgspec.convert(answer["description"], kind)


def layers_of(found: Description) -> tuple[LayerSpec, ...]:
    """Return layers with the model's cache and number of weights; how these are divided within a layer is not known."""
    outer = AttentionSpec(found.hidden, found.hidden, heads=1, kv_heads=1, head_dim=1)
    if found.calls:
        paged = replace(outer, kv_heads=found.kv_heads, head_dim=found.head_dim)
        attentions = [
            replace(paged, heads=call.heads, window=call.window, scale=call.scale, cap=call.cap) for call in found.calls
        ]
    else:
        width = max(1, -(-found.token_elements // (2 * found.layers)))
        attentions = [replace(outer, head_dim=width, two_sided=found.tier == "whole")] * found.layers
    around = found.vocab_size * found.hidden * (1 if found.tied else 2)
    each = max(0, found.parameters - around) // len(attentions)
    widths = [max(1, (each - sum(attention.weights())) // (2 * found.hidden)) for attention in attentions]
    return tuple(
        LayerSpec(attention, MlpSpec(found.hidden, width, gated=False), NormSpec("rms", 1e-6, number=2))
        for attention, width in zip(attentions, widths, strict=True)
    )
