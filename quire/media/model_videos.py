"""What a model makes of videos: from files or frames to what its tower takes."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from quire.errors import ConfigError, RequestError
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import Medium
from quire.media.placement import Marks
from quire.media.video_decode import VideoLength, decode_video, is_installed
from quire.models.config_file import processor_settings
from quire.models.vision.module_spec import ModuleVisionSpec
from quire.models.vision.pixel_settings import SAMPLING
from quire.models.vision.vision_spec import MAX_VIDEO_TOKENS, QwenVisionSpec

if TYPE_CHECKING:
    from PIL.Image import Image

    from quire.media.model_images import ModelImages
    from quire.media.pixels import Picture

_FPS = 2.0
_SIZES = ("size", "min_pixels", "max_pixels")
_SIZE = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
"""Of frames, where the checkpoint says nothing."""
_GIVEN_RATE = 24.0
"""Frames a second of frames that come without a file, as transformers supposes."""


@dataclass
class Chosen:
    """Which frames of a video are seen, once its length is known.

    Attributes:
        numbers: The frames, in order, counted from 0.
        length: How long the video is.
    """

    numbers: list[int]
    length: VideoLength


class FrameProcessor(Protocol):
    """Makes pixels of a video's frames.

    Attributes:
        settings: All that decides what a frame becomes.
    """

    settings: dict[str, Any]

    def picture(self, image: Image) -> Picture:
        """Return the pixels of a frame in mode RGB. Raises RequestError for one that is too long and thin."""
        ...


class VideoTokens(NamedTuple):
    """What stands for a video in a prompt.

    Attributes:
        times: As in `Medium`.
        num_tokens: As `count` in `Medium`; 0: tokens of its vectors alone.
        places, text: As in `Medium`.
    """

    times: list[int]
    num_tokens: int = 0
    places: bytes = b""
    text: bytes = b""


@dataclass(frozen=True)
class ModelVideos:
    """Videos for one model; subclasses choose frames, resize them and write tokens as its processor does.

    Attributes:
        spec: The model's tower.
        longest: Most tokens of a video.
        limit: Most videos of a prompt; None: as many as fit.
        stored: The settings of the checkpoint's video processor.
        replaced: Those that the server or a request replaces.
    """

    spec: QwenVisionSpec | ModuleVisionSpec
    longest: int
    limit: int | None = None
    stored: Mapping[str, Any] = field(default_factory=dict)
    replaced: Mapping[str, Any] = field(default_factory=dict)

    @property
    def marks(self) -> Marks:
        """How prompts show videos."""
        assert self.spec.video_token is not None, "a model that sees no videos"
        return Marks(self.spec.video_token, self.spec.video_token)

    @property
    def least_tokens(self) -> int:
        """Fewest tokens of a video."""
        return 1

    def with_settings(self, settings: Mapping[str, Any]) -> ModelVideos:
        """Return these videos under a request's settings. Raises RequestError for those that are not served."""
        found = replace(self, replaced={**self.replaced, **settings})
        try:
            _ = found._sampling, found._processor(1)
        except ValueError as error:
            raise RequestError(f"mm_processor_kwargs: {error}.", param="mm_processor_kwargs") from None
        return found

    def of_file(self, content: bytes) -> Medium:
        """Return the video of a file. Raises RequestError if it cannot be read, or has too many tokens."""
        chosen = Chosen([], VideoLength(0, 1))

        def choose(length: VideoLength) -> list[int]:
            chosen.length, chosen.numbers = length, self.frames_of(length)
            return chosen.numbers

        return self._medium(decode_video(content, choose), chosen)

    def of_picture(self, frames: Any) -> Medium:
        """Return the video of frames [frames, height, width, 3] uint8, all of which the model sees, or of a pair of
        frames and their `fps` in a dict, as vLLM has it. Raises RequestError for anything else."""
        import numpy as np
        from PIL import Image

        rate = _GIVEN_RATE
        if isinstance(frames, tuple) and len(frames) == 2 and isinstance(frames[1], Mapping):
            frames, rate = frames[0], frames[1].get("fps") or _GIVEN_RATE
        frames = np.asarray(frames)
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or not frames.size:
            raise RequestError("A video as an array has the shape [frames, height, width, 3] and the dtype uint8.")
        if not isinstance(rate, int | float) or not 0 < rate < math.inf:
            raise RequestError("fps of a video must be a positive number.")
        chosen = Chosen(list(range(len(frames))), VideoLength(len(frames), rate))
        return self._medium((Image.fromarray(frame) for frame in frames), chosen)

    def frames_of(self, length: VideoLength) -> list[int]:
        """Return the numbers of the frames that the model sees."""
        raise NotImplementedError

    @property
    def _frames(self) -> int:
        """How many frames a slice has."""
        raise NotImplementedError

    def _processor(self, count: int) -> FrameProcessor:
        """Return what resizes this many frames. Raises ValueError for settings that are not served."""
        raise NotImplementedError

    def _tokens(self, chosen: Chosen, slices: int, squares: int) -> VideoTokens:
        """Return what stands for slices of so many vectors each in a prompt."""
        raise NotImplementedError

    @property
    def _sampling(self) -> tuple[float, int | None, int, int]:
        """Frames a second, or the number of frames, and the fewest and most of them. Raises ValueError for settings
        that make no sense."""
        values = {**self.stored, **self.replaced}
        if self.replaced.get("fps") is not None and self.replaced.get("num_frames") is not None:
            raise ValueError("fps and num_frames say the same: leave one of them out")
        fps = values.get("fps") or _FPS
        count = values.get("num_frames") if self.replaced.get("fps") is None else None
        least, most = values.get("min_frames") or 4, values.get("max_frames") or 768
        if not isinstance(fps, int | float) or isinstance(fps, bool) or not 0 < fps < math.inf:
            raise ValueError(f"fps is {fps!r}, it must be a positive number")
        for name, value in (("num_frames", count), ("min_frames", least), ("max_frames", most)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value!r}, it must be a positive whole number")
        return float(fps), count, least, most

    def _medium(self, frames: Iterable[Image], chosen: Chosen) -> Medium:
        """Return the video of frames; what is `chosen` is known once there is the first."""
        pixels, size, rows, columns = list[bytes](), (0, 0), 0, 0
        processor: FrameProcessor | None = None
        for frame in frames:
            processor = processor or self._processor(len(chosen.numbers))
            picture = processor.picture(frame)
            if pixels and picture.pixels.shape[:2] != size:
                raise RequestError("The video's frames have several sizes: send one whose frames are alike.")
            size, rows, columns = picture.pixels.shape[:2], picture.rows, picture.columns
            pixels.append(picture.pixels.tobytes())
            if -(-len(pixels) // self._frames) * rows * columns > self.longest:
                raise RequestError(
                    f"The video has more than {self.longest:,} tokens, which is the most here: ask for fewer frames or "
                    "pixels (mm_processor_kwargs with fps, num_frames or max_pixels), or send a shorter one."
                )
        assert processor is not None, "a video without frames"
        pixels += pixels[-1:] * (-len(pixels) % self._frames)
        slices = len(pixels) // self._frames
        found, content = self._tokens(chosen, slices, rows * columns), b"".join(pixels)
        what = json.dumps(["video", processor.settings, size, found.times], sort_keys=True)
        digest = sha256(what.encode() + b"\0" + content).digest()
        return Medium(
            digest, *size, found.num_tokens or slices * rows * columns, content, rows, columns, places=found.places,
            text=found.text, times=array("i", found.times).tobytes(), kind="video",
        )  # fmt: skip


@dataclass(frozen=True)
class QwenVideos(ModelVideos):
    """Videos of Qwen2-VL and Qwen2.5-VL (Wang et al. 2024, section 2.1), whose slices' positions tell their times.

    Frames are chosen as transformers' Qwen2VLVideoProcessor does it, and each is resized as images are, by Pillow.
    """

    spec: QwenVisionSpec

    @property
    def _frames(self) -> int:
        return self.spec.frames

    def frames_of(self, length: VideoLength) -> list[int]:
        """Return the numbers of the frames that the model sees, a whole number of pairs where there are two."""
        fps, count, least, most = self._sampling
        pair, total = self.spec.frames, length.frames
        if count is not None:
            wanted = float(round(count / pair) * pair)
        else:
            most = min(most, total) // pair * pair
            wanted = min(max(total / length.rate * fps, least), most, total)
            wanted = math.floor(wanted / pair) * pair
        chosen = max(1, min(int(wanted), total))
        import numpy as np

        return [int(np.float32(number * (total / chosen))) for number in range(chosen)]

    def _processor(self, count: int) -> FrameProcessor:
        from quire.media.qwen_processor import QwenProcessor  # which imports numpy

        return QwenProcessor(self.spec, self._sizes)

    def _tokens(self, chosen: Chosen, slices: int, squares: int) -> VideoTokens:
        import numpy as np

        spec, between = self.spec, 1.0
        if spec.tokens_per_second:
            seconds = chosen.length.frames / chosen.length.rate / len(chosen.numbers)
            between = spec.tokens_per_second * spec.frames * seconds
        times = np.arange(slices, dtype=np.float32) * np.float32(between)
        return VideoTokens(times.astype(np.int32).tolist())

    @property
    def _sizes(self) -> dict[str, Any]:
        """The settings by which frames are resized."""
        stored = {"size": _SIZE, **self.stored}
        if any(name in self.replaced for name in _SIZES) or "min_pixels" in self.stored:
            stored.pop("size")
        if "size" in self.replaced:
            stored = {name: value for name, value in stored.items() if name not in _SIZES}
        return {name: value for name, value in {**stored, **self.replaced}.items() if name not in SAMPLING}


def load_model_videos(config: Config, images: ModelImages) -> ModelVideos | None:
    """Return what a model makes of videos under resolved settings; None if it sees none, or PyAV is not installed.

    Args:
        config: The settings.
        images: What it makes of images.
    """
    from quire.media.timed_videos import TimedVideos

    limit, spec = config.media.most_of("video"), images.spec
    if spec.video_token is None or limit == 0 or not is_installed():
        return None
    stored = processor_settings(Path(config.model.model), "video_processor")
    asked = config.model.max_model_len
    longest = min(MAX_VIDEO_TOKENS, asked) if isinstance(asked, int) and asked > 0 else MAX_VIDEO_TOKENS
    videos: ModelVideos
    if isinstance(spec, ModuleVisionSpec):
        videos = TimedVideos(spec, longest, limit, stored, processor=images.processor)
    else:
        assert isinstance(spec, QwenVisionSpec), "another tower that sees videos"
        videos = QwenVideos(spec, longest, limit, stored)
    try:
        return videos.with_settings(config.media.mm_processor_kwargs)
    except RequestError as error:
        raise ConfigError(f"--{error.message}".replace("_", "-"), param="mm_processor_kwargs") from None
