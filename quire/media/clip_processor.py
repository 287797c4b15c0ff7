"""CLIP's image processor, as LLaVA uses it: images become squares of one size (Radford et al. 2021, Liu et al. 2023).

Each step computes what transformers' CLIPImageProcessorPil and LlavaImageProcessorPil compute, bit for bit; numbers are
made of the pixels by the tower (`PixelValues`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import RequestError
from quire.media.pixels import Picture, resampling
from quire.models.vision.pixel_settings import CHANNELS, PixelValues
from quire.models.vision.vision_spec import ClipSpec

if TYPE_CHECKING:
    from PIL.Image import Image

    from quire.media.pixels import Pixels

MAX_STRETCHED = 100_000_000
"""Most pixels of a resized image, of which the middle is cut out: a line of pixels becomes a very long one."""


class ClipProcessor:
    """Makes squares of images.

    Args:
        spec: The tower, which says how large they are.
        settings: Those of the checkpoint's image processor.

    Raises:
        ValueError: A setting is not served; the message says which one.
    """

    SETTINGS = ("do_resize", "size", "resample", "do_center_crop", "crop_size", "do_pad")
    """Settings that a server may replace."""

    def __init__(self, spec: ClipSpec, settings: Mapping[str, Any]) -> None:
        self._side, self._count = spec.image_size, spec.tokens
        self._pads = bool(settings.get("do_pad", False))
        self._background = tuple(int(value * 255) for value in spec.pixels.mean or (0.0,) * CHANNELS)
        self._resizes = bool(settings.get("do_resize", True))
        self._size = _size(settings.get("size", {"shortest_edge": 224}))
        self._resample = resampling(settings)
        self._crops = bool(settings.get("do_center_crop", True))
        self._crop = _pair(settings.get("crop_size", 224), "crop_size")
        made = self._crop if self._crops else self._size if self._resizes else None
        if made != (self._side, self._side):
            raise ValueError(f"it makes images of {made}, and the tower reads squares of {self._side} pixels")
        self.settings: dict[str, Any] = {
            "clip": self._side, "pad": self._pads, "background": self._background, "resize": self._resizes,
            "size": self._size, "resample": self._resample, "crop": self._crops, "values": _values(spec.pixels),
        }  # fmt: skip
        """All that decides what an image becomes."""

    def picture(self, image: Image) -> Picture:
        """Return the pixels [size, size, 3] of an image in mode RGB. Raises RequestError for one that is too long and
        thin."""
        if self._pads:
            image = _squared(image, self._background)
        if self._resizes:
            size = _resized(image.size, self._size)
            if size[0] * size[1] > MAX_STRETCHED:
                raise RequestError(
                    f"The image has {image.width} x {image.height} pixels, one side much longer than the other: cut it."
                )
            image = image.resize(size, resample=self._resample)
        pixels = np.asarray(image)
        return Picture(_center_crop(pixels, self._crop) if self._crops else pixels, self._count)


def _values(pixels: PixelValues) -> list[Any]:
    return [pixels.scale, pixels.mean, pixels.std]


def _pair(value: Any, name: str) -> tuple[int, int]:
    """Return the height and width that a setting names: a number, or an object of both."""
    if isinstance(value, Mapping):
        value = value.get("height"), value.get("width")
    found = tuple(value) if isinstance(value, list | tuple) else (value, value)
    if len(found) != 2 or not all(type(each) is int and each > 0 for each in found):
        raise ValueError(f"{name} is {value!r}, it must have a height and a width")
    return found[0], found[1]


def _size(value: Any) -> int | tuple[int, int]:
    """Return the length of the shorter side, or height and width."""
    if isinstance(value, Mapping) and "shortest_edge" in value:
        value = value["shortest_edge"]
    if type(value) is int and value > 0:
        return value
    return _pair(value, "size")


def _resized(size: tuple[int, int], wanted: int | tuple[int, int]) -> tuple[int, int]:
    """Return width and height of a resized image, as Pillow orders them."""
    if not isinstance(wanted, int):
        return wanted[1], wanted[0]
    width, height = size
    shorter, longer = min(size), max(size)
    scaled = int(wanted * longer / shorter)
    return (wanted, scaled) if width <= height else (scaled, wanted)


def _squared(image: Image, background: tuple[int, ...]) -> Image:
    """Return the image in the middle of a square."""
    from PIL import Image as pillow

    width, height = image.size
    if width == height:
        return image
    side = max(width, height)
    if side * side > MAX_STRETCHED:
        raise RequestError(f"The image has {width} x {height} pixels, one side much longer than the other: cut it.")
    square = pillow.new("RGB", (side, side), background)
    square.paste(image, ((side - width) // 2, (side - height) // 2))
    return square


def _center_crop(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """Cut out the middle; what is smaller is surrounded by black."""
    height, width = pixels.shape[:2]
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    if top >= 0 and left >= 0:
        return pixels[top : top + size[0], left : left + size[1]]
    whole = max(size[0], height), max(size[1], width)
    around = np.zeros((*whole, CHANNELS), dtype=pixels.dtype)
    above, before = -(-(whole[0] - height) // 2), -(-(whole[1] - width) // 2)
    around[above : above + height, before : before + width] = pixels
    top, left = top + above, left + before
    return around[max(0, top) : min(whole[0], top + size[0]), max(0, left) : min(whole[1], left + size[1])]
