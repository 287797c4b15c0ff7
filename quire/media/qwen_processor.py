"""Qwen2-VL's image processor: images keep their shape, and about their size, in whole squares of patches (Wang et al.
2024, "Qwen2-VL", section 2.1).

The size is computed as in transformers' `smart_resize`, and pixels are those of its Qwen2VLImageProcessorPil, bit for
bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import RequestError
from quire.media.pixels import Picture, resampling
from quire.models.vision.vision_spec import QwenVisionSpec, pixel_bounds

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ASPECT = 200
"""Largest ratio of an image's sides."""


class QwenProcessor:
    """Resizes images to whole squares.

    Args:
        spec: The tower, which says how large squares are.
        settings: Those of the checkpoint's image processor.

    Raises:
        ValueError: A setting is not served; the message says which one.
    """

    SETTINGS = ("size", "min_pixels", "max_pixels", "resample")
    """Settings that a server may replace."""

    def __init__(self, spec: QwenVisionSpec, settings: Mapping[str, Any]) -> None:
        self._square = spec.square
        self._least, self._most = pixel_bounds(settings)
        self._resample = resampling(settings)
        sizes = {"patch_size": spec.patch_size, "merge_size": spec.merge, "temporal_patch_size": spec.frames}
        for name, value in sizes.items():
            if settings.get(name, value) != value:
                raise ValueError(f"{name} is {settings[name]!r}, and the tower's is {value}")
        if not settings.get("do_resize", True):
            raise ValueError("do_resize is false, and the tower reads whole squares of patches alone")
        values = spec.pixels
        self.settings: dict[str, Any] = {
            "qwen2_vl": self._square, "least": self._least, "most": self._most, "resample": self._resample,
            "values": [values.scale, values.mean, values.std],
        }  # fmt: skip
        """All that decides what an image becomes."""

    def picture(self, image: Image) -> Picture:
        """Return the pixels of an image in mode RGB, and how its vectors lie. Raises RequestError for one that is too
        long and thin."""
        height, width = self._size(image.height, image.width)
        pixels = np.asarray(image.resize((width, height), resample=self._resample))
        rows, columns = height // self._square, width // self._square
        return Picture(pixels, rows * columns, rows, columns)

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width in whole squares, near to the image's shape and within the bounds of pixels."""
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise RequestError(
                f"The image has {width} x {height} pixels, one side over {MAX_ASPECT} times the other: cut it."
            )
        square = self._square
        found = round(height / square) * square, round(width / square) * square
        if found[0] * found[1] > self._most:
            ratio = math.sqrt((height * width) / self._most)
            sides = (math.floor(side / ratio / square) * square for side in (height, width))
            return max(square, next(sides)), max(square, next(sides))
        if found[0] * found[1] < self._least:
            ratio = math.sqrt(self._least / (height * width))
            sides = (math.ceil(side * ratio / square) * square for side in (height, width))
            return next(sides), next(sides)
        return found
