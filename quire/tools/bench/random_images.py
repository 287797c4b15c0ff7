"""Images to measure with, as vLLM's random-mm dataset has them: how many a request, and how large.

Images are PNG files of random colours, in squares of 8 pixels so that they stay small on the way.
"""

from __future__ import annotations

import ast
import base64
import json
import math
import random
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError

_SQUARE = 8
_LARGEST = 2**14
Bucket = tuple[int, int]
"""Height and width of an image, in pixels."""


@dataclass(frozen=True)
class ImageOptions:
    """How many images a request has, and their sizes."""

    random_mm_base_items_per_request: int = 1
    """random-mm: images a request."""
    random_mm_num_mm_items_range_ratio: float = 0.0
    """random-mm: the number is drawn from images × (1 ± this)."""
    random_mm_limit_mm_per_prompt: str = '{"image": 255}'
    """random-mm: most images a request, as JSON."""
    random_mm_bucket_config: str = "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}"
    """random-mm: (height, width, 1) of images, each with its probability."""

    def draw(self, rng: random.Random) -> Iterator[tuple[str, ...]]:
        """Yield the images of one request after the other, as data: URLs. Raises ConfigError for wrong options."""
        base, ratio = self.random_mm_base_items_per_request, self.random_mm_num_mm_items_range_ratio
        if base < 0 or not 0 <= ratio <= 1:
            raise _wrong("base_items_per_request", "is at least 0, and the range ratio in [0, 1]")
        sizes, weights = self._buckets()
        most = self._limit()
        least, largest = min(most, math.floor(base * (1 - ratio))), min(most, math.ceil(base * (1 + ratio)))
        while True:
            chosen = rng.choices(sizes, weights, k=rng.randint(least, largest))
            yield tuple(data_url(height, width, rng) for height, width in chosen)

    def _buckets(self) -> tuple[list[Bucket], list[float]]:
        try:
            found: Any = ast.literal_eval(self.random_mm_bucket_config)
            pairs = [(tuple(map(int, size)), float(share)) for size, share in found.items() if float(share) > 0]
        except (ValueError, SyntaxError, TypeError, AttributeError, RecursionError, MemoryError):
            pairs = []
        if not pairs or not all(_is_size(size) for size, _ in pairs):
            raise _wrong("bucket_config", "looks like {(256, 256, 1): 0.5, (720, 1280, 1): 0.5}; videos are not sent")
        return [(size[0], size[1]) for size, _ in pairs], [share for _, share in pairs]

    def _limit(self) -> int:
        try:
            most = json.loads(self.random_mm_limit_mm_per_prompt)["image"]
        except (ValueError, LookupError, TypeError, RecursionError):
            most = None
        if type(most) is not int or most < 0:
            raise _wrong("limit_mm_per_prompt", 'looks like {"image": 255}')
        return most


def _is_size(size: Sequence[int]) -> bool:
    return len(size) == 3 and all(0 < side <= _LARGEST for side in size[:2]) and size[2] == 1


def _wrong(name: str, why: str) -> ConfigError:
    return ConfigError(f"--random-mm-{name.replace('_', '-')} {why}.", param=f"random_mm_{name}")


def data_url(height: int, width: int, rng: random.Random) -> str:
    """Return an image of this size, of random colours, as a data: URL."""
    across, rows = -(-width // _SQUARE), list[bytes]()
    for _ in range(-(-height // _SQUARE)):
        colours = rng.randbytes(3 * across)
        line = b"".join(colours[at : at + 3] * _SQUARE for at in range(0, len(colours), 3))[: 3 * width]
        rows += [b"\0" + line] * _SQUARE
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(b"".join(rows[:height]), 1)), (b"IEND", b""))
    content = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
