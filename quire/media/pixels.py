"""What image processors make: pixels of eight bits, and the vectors that a tower makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

    Pixels = NDArray[np.uint8]

_FILTERS, _BICUBIC = range(6), 3
"""Pillow's."""


class Picture(NamedTuple):
    """An image as a tower reads it.

    Attributes:
        pixels: [height, width, 3] uint8; empty for towers that take `tensors`.
        tokens: How many tokens it has: as many as the tower makes vectors of it, and those between them.
        rows, columns: How these lie, in models whose positions tell rows and columns; 0 in others.
        tensors, places, text, two_sided: As in `Medium`.
    """

    pixels: Pixels
    tokens: int
    rows: int = 0
    columns: int = 0
    tensors: Mapping[str, NDArray[Any]] = {}
    places: bytes = b""
    text: bytes = b""
    two_sided: bool = False


class ImageProcessor(Protocol):
    """Makes pixels of pictures, for one tower.

    Attributes:
        settings: All that decides what an image becomes.
    """

    settings: dict[str, Any]

    def picture(self, image: Image) -> Picture:
        """Return what a tower reads of an image in mode RGB. Raises RequestError for one of a shape that it cannot
        read."""
        ...


def resampling(settings: Mapping[str, Any]) -> int:
    """Return the number of Pillow's filter that an image processor's settings name. Raises ValueError if there is none
    of this number."""
    found: int = settings.get("resample", _BICUBIC)
    if found not in _FILTERS:
        raise ValueError(f"resample is {found!r}, it must be a number from 0 to 5")
    return found
