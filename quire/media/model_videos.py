"""What a model makes of videos: from files or frames to what its tower takes (Wang et al. 2024, "Qwen2-VL", section
2.1).

Frames are chosen as transformers' Qwen2VLVideoProcessor does it, and each is resized as images are, by Pillow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError, RequestError
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import Medium
from quire.media.placement import Marks
from quire.media.video_decode import VideoLength, decode_video, is_installed
from quire.models.config_file import processor_settings
from quire.models.vision.vision_spec import MAX_VIDEO_TOKENS, SAMPLING, QwenVisionSpec

if TYPE_CHECKING:
    from PIL.Image import Image

    from quire.media.qwen_processor import QwenProcessor

_FPS = 2.0
_SIZES = ("size", "min_pixels", "max_pixels")
_SIZE = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
"""Of frames, where the checkpoint says nothing."""
_GIVEN_RATE = 24.0
"""Frames a second of frames that come without a file, as transformers supposes."""


@dataclass(frozen=True)
class ModelVideos:
    """Videos for one model.

    Attributes:
        spec: The model's tower.
        longest: Most tokens of a video.
        limit: Most videos of a prompt; None: as many as fit.
        stored: The settings of the checkpoint's video processor.
        replaced: Those that the server or a request replaces.
    """

    spec: QwenVisionSpec
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
            _ = found._sampling, found._processor()
        except ValueError as error:
            raise RequestError(f"mm_processor_kwargs: {error}.", param="mm_processor_kwargs") from None
        return found

    def of_file(self, content: bytes) -> Medium:
        """Return the video of a file. Raises RequestError if it cannot be read, or has too many tokens."""
        seconds = [0.0]

        def choose(length: VideoLength) -> list[int]:
            chosen = self.frames_of(length)
            seconds[0] = length.frames / length.rate / len(chosen)
            return chosen

        return self._medium(decode_video(content, choose), seconds)

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
        return self._medium((Image.fromarray(frame) for frame in frames), [1 / rate])

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

    @property
    def _sizes(self) -> dict[str, Any]:
        """The settings by which frames are resized."""
        stored = {"size": _SIZE, **self.stored}
        if any(name in self.replaced for name in _SIZES) or "min_pixels" in self.stored:
            stored.pop("size")
        if "size" in self.replaced:
            stored = {name: value for name, value in stored.items() if name not in _SIZES}
        return {name: value for name, value in {**stored, **self.replaced}.items() if name not in SAMPLING}

    def _processor(self) -> QwenProcessor:
        """Return what resizes frames. Raises ValueError for settings that are not served."""
        from quire.media.qwen_processor import QwenProcessor  # which imports numpy

        return QwenProcessor(self.spec, self._sizes)

    def _medium(self, frames: Iterable[Image], seconds: list[float]) -> Medium:
        """Return the video of frames; `seconds` has the time from one to the next, once there is the first."""
        import numpy as np

        processor, spec = self._processor(), self.spec
        pixels, size, rows, columns = list[bytes](), (0, 0), 0, 0
        for frame in frames:
            picture = processor.picture(frame)
            if pixels and picture.pixels.shape[:2] != size:
                raise RequestError("The video's frames have several sizes: send one whose frames are alike.")
            size, rows, columns = picture.pixels.shape[:2], picture.rows, picture.columns
            pixels.append(picture.pixels.tobytes())
            if -(-len(pixels) // spec.frames) * rows * columns > self.longest:
                raise RequestError(
                    f"The video has more than {self.longest:,} tokens, which is the most here: ask for fewer frames or "
                    "pixels (mm_processor_kwargs with fps, num_frames or max_pixels), or send a shorter one."
                )
        pixels += pixels[-1:] * (-len(pixels) % spec.frames)
        slices = len(pixels) // spec.frames
        between = spec.tokens_per_second * spec.frames * seconds[0] if spec.tokens_per_second else 1.0
        times = (np.arange(slices, dtype=np.float32) * np.float32(between)).astype(np.int32)
        content = b"".join(pixels)
        what = json.dumps(["video", processor.settings, size, times.tolist()], sort_keys=True)
        digest = sha256(what.encode() + b"\0" + content).digest()
        count = slices * rows * columns
        return Medium(digest, *size, count, content, rows, columns, times=times.tobytes(), kind="video")


def load_model_videos(config: Config, spec: Any) -> ModelVideos | None:
    """Return what a model makes of videos under resolved settings; None if it sees none, or PyAV is not installed.

    Args:
        config: The settings.
        spec: The model's tower.
    """
    limit = config.media.most_of("video")
    if not isinstance(spec, QwenVisionSpec) or spec.video_token is None or limit == 0 or not is_installed():
        return None
    stored = processor_settings(Path(config.model.model), "video_processor")
    asked = config.model.max_model_len
    longest = min(MAX_VIDEO_TOKENS, asked) if isinstance(asked, int) and asked > 0 else MAX_VIDEO_TOKENS
    videos = ModelVideos(spec, longest, limit, stored)
    try:
        return videos.with_settings(config.media.mm_processor_kwargs)
    except RequestError as error:
        raise ConfigError(f"--{error.message}".replace("_", "-"), param="mm_processor_kwargs") from None
