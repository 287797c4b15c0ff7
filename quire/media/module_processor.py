"""A checkpoint's own processor of transformers, for towers that transformers' modules compute."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import RequestError
from quire.media.pixels import Picture
from quire.models.vision.module_spec import ModuleVisionSpec

if TYPE_CHECKING:
    from PIL.Image import Image

_GRID = "image_grid_thw"


class ModuleProcessor:
    """Makes the tensors and tokens of images that a checkpoint's own processor makes.

    Args:
        spec: The tower.
        settings: Those of the checkpoint's image processor.
    """

    SETTINGS: tuple[str, ...] = ()
    """Settings that a server may replace."""

    def __init__(self, spec: ModuleVisionSpec, settings: Mapping[str, Any]) -> None:
        self._spec = spec
        self.settings: dict[str, Any] = {"modules": spec.architecture, "processor": dict(settings)}
        """All that decides what an image becomes."""

    @cached_property
    def _processor(self) -> Any:
        """transformers' processor, which only processes load that read images."""
        module = importlib.import_module("quire.models.fallback.image_processor")
        return module.CheckpointProcessor(Path(self._spec.directory), self._spec.image_token)

    def tokens_of_text(self, text: str) -> list[int]:
        """Return the tokens of a text that stands among other tokens."""
        return [int(each) for each in self._processor.tokens_of_text(text)]

    def picture(self, image: Image) -> Picture:
        """Return the tensors and tokens of an image in mode RGB. Raises RequestError if the processor refuses it."""
        found = self._processor.inputs(image)
        text = np.asarray(found.tokens, dtype=np.int32)
        (places,) = np.nonzero(text == self._spec.image_token)
        if not len(places):
            raise RequestError(f"The model's processor makes no tokens of an image of {image.width} x {image.height}.")
        if self._spec.two_sided and len(places) > self._spec.longest:
            raise RequestError(
                f"An image of {image.width} x {image.height} has {len(places)} vectors, and a step has room for "
                f"{self._spec.longest} that see one another: send a smaller image."
            )
        count = int(places[-1] - places[0]) + 1
        rows = columns = 0
        if self._spec.merge:
            rows, columns = (int(side) // self._spec.merge for side in found.tensors[_GRID][0][1:])
        return Picture(
            np.empty((0, 0, 3), np.uint8),
            count,
            rows,
            columns,
            tensors=found.tensors,
            places=(places - places[0]).astype(np.int32).tobytes() if len(places) < count else b"",
            text=text.tobytes(),
            two_sided=self._spec.two_sided,
        )
