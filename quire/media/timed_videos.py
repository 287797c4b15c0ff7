"""Videos whose times are told by texts between their slices, as Qwen3-VL and Qwen 3.5 have them (Bai et al. 2025,
"Qwen3-VL Technical Report", section 2).

Frames are chosen, and their size computed, as transformers' Qwen3VLVideoProcessor does it; they are resized by Pillow.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.errors import RequestError
from quire.media.model_videos import Chosen, FrameProcessor, ModelVideos, VideoTokens
from quire.media.pixels import Picture, resampling
from quire.media.placement import Marks
from quire.media.video_decode import VideoLength
from quire.models.vision.module_spec import ModuleVisionSpec, VideoLayout
from quire.models.vision.pixel_settings import SAMPLING
from quire.models.vision.vision_spec import MAX_VIDEO_TOKENS

if TYPE_CHECKING:
    from PIL.Image import Image

_SIZE = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}
"""Pixels of all frames of a video together, where the checkpoint says nothing."""
_FRAME_TOKENS = 768
_MAX_ASPECT = 200


@dataclass(frozen=True)
class TimedVideos(ModelVideos):
    """Videos of one model, each slice of which stands behind a text such as `<1.5 seconds>`.

    Attributes:
        processor: Knows the tokens of texts.
    """

    spec: ModuleVisionSpec
    processor: Any = None

    @property
    def marks(self) -> Marks:
        """How prompts show videos: the tokens around a placeholder are those of the slices."""
        return Marks(self._layout.token, self._layout.token, around=self._layout.around)

    @property
    def _layout(self) -> VideoLayout:
        assert self.spec.video is not None, "a model that sees no videos"
        return self.spec.video

    @property
    def _frames(self) -> int:
        return self._layout.frames

    def frames_of(self, length: VideoLength) -> list[int]:
        """Return the numbers of the frames that the model sees, from the first to the last one."""
        import numpy as np

        fps, count, least, most = self._sampling
        if count is None:
            count = min(max(int(length.frames / length.rate * fps), least), most, length.frames)
        count = min(count, MAX_VIDEO_TOKENS * self._frames)
        return [int(each) for each in np.linspace(0, length.frames - 1, count).round()]

    def _processor(self, count: int) -> FrameProcessor:
        settings = {name: value for name, value in {**self.stored, **self.replaced}.items() if name not in SAMPLING}
        return _Frames(self._layout, self.spec.merge, settings, max(count, self._frames))

    def _tokens(self, chosen: Chosen, slices: int, squares: int) -> VideoTokens:
        layout, text, places = self._layout, list[int](), list[int]()
        numbers = chosen.numbers + chosen.numbers[-1:] * (-len(chosen.numbers) % layout.frames)
        seconds = [number / chosen.length.rate for number in numbers]
        for first in range(0, slices * layout.frames, layout.frames):
            middle = (seconds[first] + seconds[first + layout.frames - 1]) / 2
            text += [*self.processor.tokens_of_text(f"<{middle:.1f} seconds>"), layout.around[0]]
            places += range(len(text), len(text) + squares)
            text += [*[layout.token] * squares, layout.around[1]]
        count, own = places[-1] - places[0] + 1, array("i", [place - places[0] for place in places])
        among = own.tobytes() if count > len(own) else b""
        return VideoTokens([0] * slices, count, among, array("i", text).tobytes())


class _Frames:
    """Resizes the frames of one video to whole squares.

    Args:
        layout: How the model reads videos.
        merge: How many patches of a side become one vector.
        settings: Those of the video processor.
        count: Number of the frames, which share the pixels that a video may have.

    Raises:
        ValueError: A setting is not served; the message says which one.
    """

    def __init__(self, layout: VideoLayout, merge: int, settings: Mapping[str, Any], count: int) -> None:
        self._square, self._layout, self._count = layout.patch_size * merge, layout, count
        sizes = {"patch_size": layout.patch_size, "merge_size": merge, "temporal_patch_size": layout.frames}
        for name, value in sizes.items():
            if settings.get(name, value) != value:
                raise ValueError(f"{name} is {settings[name]!r}, and the tower's is {value}")
        if not settings.get("do_resize", True):
            raise ValueError("do_resize is false, and the tower reads whole squares of patches alone")
        size = settings.get("size") or _SIZE
        bounds: list[Any] = [size.get(name) if isinstance(size, Mapping) else None for name in _SIZE]
        if not all(type(each) is int and each > 0 for each in bounds):
            raise ValueError(f"size is {size!r}, it must have a shortest_edge and a longest_edge")
        self._least: int
        self._most: int
        self._least, self._most = bounds
        if settings.get("cap_pixels_per_frame"):
            share = min(settings.get("max_video_tokens", _FRAME_TOKENS) * self._square**2, self._most // count)
            self._most = max(share, int(self._least * 1.05)) * count
        self._resample = resampling(settings)
        values = layout.pixels
        self.settings: dict[str, Any] = {
            "qwen3_vl": self._square, "least": self._least, "most": self._most, "resample": self._resample,
            "values": [values.scale, values.mean, values.std],
        }  # fmt: skip

    def picture(self, image: Image) -> Picture:
        """Return the pixels of a frame in mode RGB. Raises RequestError for one that is too long and thin."""
        import numpy as np

        height, width = self._size(image.height, image.width)
        pixels = np.asarray(image.resize((width, height), resample=self._resample))
        rows, columns = height // self._square, width // self._square
        return Picture(pixels, rows * columns, rows, columns)

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width in whole squares, so that all frames have a number of pixels within the bounds."""
        square, count, pair = self._square, self._count, self._layout.frames
        if min(height, width) < square:
            scale = max(square / height, square / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > _MAX_ASPECT * min(height, width):
            raise RequestError(
                f"The video's frames have one side over {_MAX_ASPECT} times the other, {height} x {width} pixels."
            )
        found = round(height / square) * square, round(width / square) * square
        pixels = round(count / pair) * pair * found[0] * found[1]
        if pixels > self._most:
            ratio = math.sqrt(count * height * width / self._most)
            return (
                max(square, math.floor(height / ratio / square) * square),
                max(square, math.floor(width / ratio / square) * square),
            )
        if pixels < self._least:
            ratio = math.sqrt(self._least / (count * height * width))
            return math.ceil(height * ratio / square) * square, math.ceil(width * ratio / square) * square
        return found
