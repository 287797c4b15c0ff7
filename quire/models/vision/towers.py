"""Builds the tower that a model's spec describes."""

from __future__ import annotations

import importlib

from quire.models.layers.factory import LayerFactory
from quire.models.vision.clip import ClipTower
from quire.models.vision.module_spec import ModuleVisionSpec
from quire.models.vision.qwen import QwenTower
from quire.models.vision.tower import Tower
from quire.models.vision.vision_spec import ClipSpec, VisionSpec


def build_tower(spec: VisionSpec, build: LayerFactory) -> Tower:
    """Build a tower without its weights, which `build.layers` load."""
    if isinstance(spec, ModuleVisionSpec):
        tower = importlib.import_module("quire.models.fallback.tower")  # which imports transformers
        found: Tower = tower.ModuleTower(spec, build)
        return found
    return ClipTower(spec, build) if isinstance(spec, ClipSpec) else QwenTower(spec, build)


def check_tower(spec: VisionSpec, tower: Tower) -> None:
    """Compare a loaded tower of transformers' modules with what their own forward makes of an image.

    Raises:
        CheckpointError: They differ, or the text model needs more of an image than vectors; the message says what.
    """
    if isinstance(spec, ModuleVisionSpec):
        importlib.import_module("quire.models.fallback.tower_check").check(tower)
