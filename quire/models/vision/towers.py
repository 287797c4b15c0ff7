"""Builds the towers that a model's spec describes."""

from __future__ import annotations

import importlib

from quire.foundation.messages.to_engine import MediumKind
from quire.models.audio.hearing_spec import HearingSpec
from quire.models.layers.factory import LayerFactory
from quire.models.vision.clip import ClipTower
from quire.models.vision.module_spec import ModuleVisionSpec
from quire.models.vision.qwen import QwenTower
from quire.models.vision.tower import Tower
from quire.models.vision.vision_spec import ClipSpec, VisionSpec


def kinds_of(spec: VisionSpec | HearingSpec) -> tuple[MediumKind, ...]:
    """Return the kinds of media that a tower computes."""
    return ("audio",) if isinstance(spec, HearingSpec) else ("image", "video")


def build_tower(spec: VisionSpec | HearingSpec, build: LayerFactory) -> Tower:
    """Build a tower without its weights, which `build.layers` load."""
    if isinstance(spec, HearingSpec):
        hearing: Tower = importlib.import_module("quire.models.fallback.audio_tower").HearingTower(spec, build)
        return hearing
    if isinstance(spec, ModuleVisionSpec):
        tower = importlib.import_module("quire.models.fallback.tower")  # which imports transformers
        found: Tower = tower.ModuleTower(spec, build)
        return found
    return ClipTower(spec, build) if isinstance(spec, ClipSpec) else QwenTower(spec, build)


def check_tower(spec: VisionSpec | HearingSpec, tower: Tower) -> None:
    """Compare a loaded tower of transformers' modules with what their own forward makes of an image or a sound.

    Raises:
        CheckpointError: They differ, or the text model needs more of it than vectors; the message says what.
    """
    if isinstance(spec, HearingSpec):
        importlib.import_module("quire.models.fallback.audio_tower").check(tower)
    if isinstance(spec, ModuleVisionSpec):
        importlib.import_module("quire.models.fallback.tower_check").check(tower)
