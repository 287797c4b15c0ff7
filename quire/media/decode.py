"""Files of images to pixels: bounded in size, turned upright, in red, green and blue of eight bits."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

from quire.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from types import ModuleType

    from PIL.Image import Image

MAX_PIXELS = 100_000_000
"""Most pixels of an image."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are read, by Pillow's names: those that browsers and cameras write."""
Colour = tuple[int, int, int]
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N", "I")


def decode(content: bytes, background: Colour | None = None) -> Image:
    """Return the picture of a file, as `as_rgb` does; of an animation, the first one. Raises RequestError if it is none
    of FORMATS, is broken, or has more than MAX_PIXELS."""
    pillow = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about size, which is checked here, and broken metadata
            with pillow.open(io.BytesIO(content), formats=FORMATS) as image:
                _check_size(image)
                image.load()
                return as_rgb(image, background)
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # whatever decoders raise for broken files: theirs is a long list
        raise RequestError(
            f"The image cannot be read ({type(error).__name__}): send a whole file of type {', '.join(FORMATS)}."
        ) from None


def as_rgb(image: Image, background: Colour | None = None) -> Image:
    """Return a picture upright, as its EXIF orientation says, in mode RGB. Raises RequestError for pictures of floating
    point.

    Args:
        background: What shows through transparent pixels; None: transparency is left out, as in transformers.
    """
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    if background is not None and upright.has_transparency_data:
        below = _pillow().new("RGBA", upright.size, (*background, 255))
        upright = _pillow().alpha_composite(below, upright.convert("RGBA"))
    if upright.mode in _SIXTEEN_BITS:
        upright = _eight_bits(upright)
    if upright.mode == "F":
        raise RequestError("Images of floating point are not read: send eight bits a colour.")
    return upright if upright.mode == "RGB" else upright.convert("RGB")


def _check_size(image: Image) -> None:
    width, height = image.size
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise RequestError(
            f"The image has {width} x {height} pixels, and at most {MAX_PIXELS:,} are read: send a smaller one."
        )


def _eight_bits(image: Image) -> Image:
    """Return a grey picture of 16 bits as one of 8: Pillow would cut off all that is lighter than 255."""
    import numpy as np

    values = np.asarray(image)
    if image.mode == "I" and values.max(initial=0) <= 255:
        values = values.clip(0).astype(np.uint8)
    else:
        values = (values.clip(0, 65535) // 257).astype(np.uint8)
    grey: Image = _pillow().fromarray(values)
    return grey


def check_pillow() -> None:
    """Raise a ConfigError if Pillow is not installed."""
    _pillow()


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("Images need Pillow: pip install 'quire[media]'.", param="model") from None
    return Image
