"""Files of videos to some of their frames: bounded in length, size and number."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.errors import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_FRAMES = 108_000
"""Most frames of a file: an hour of 30 frames a second."""
MAX_PIXELS = 16 * 2**20
"""Most pixels of a frame."""
MAX_RATE = 1_000
_CONTAINERS = "MP4, MOV, WebM, Matroska, AVI or GIF"


class VideoLength(NamedTuple):
    """How long a video is.

    Attributes:
        frames: Number of its frames.
        rate: Frames a second.
    """

    frames: int
    rate: float


def is_installed() -> bool:
    """Whether PyAV is installed, which decodes videos."""
    return importlib.util.find_spec("av") is not None


def decode_video(content: bytes, choose: Callable[[VideoLength], list[int]]) -> Iterator[Image]:
    """Yield frames of a file in mode RGB, one after the other, so that only one is held at a time.

    Args:
        content: The file.
        choose: Returns the numbers of the frames, in order; numbers may come again.

    Raises:
        RequestError: The file is of another type, is broken, too long or too large.
    """
    kind = _container(content)
    with _broken_files_are_refused():
        wanted = choose(_length_of(content, kind))
        given, last = 0, None
        with _opened(content, kind) as stream:
            for number, frame in enumerate(_decoded(stream)):
                while given < len(wanted) and wanted[given] == number:
                    last = _picture(frame)
                    given += 1
                    yield last
                if given == len(wanted):
                    return
    if last is None:
        raise RequestError("The video has no frames that can be decoded: send another one.")
    for _ in range(len(wanted) - given):  # a file may end before all frames that it says it has
        yield last


def _length_of(content: bytes, kind: str) -> VideoLength:
    """Count the frames without decoding them."""
    frames = 0
    with _opened(content, kind) as stream:
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        for packet in stream.container.demux(stream):
            frames += packet.size > 0
            if frames > MAX_FRAMES:
                raise RequestError(f"The video has more than {MAX_FRAMES:,} frames: send it in parts.")
    if not frames:
        raise RequestError("The video has no frames: send another one.")
    if not 0 < rate <= MAX_RATE:
        raise RequestError(f"The video does not say how many frames it has a second, or more than {MAX_RATE:,}.")
    return VideoLength(frames, rate)


@contextlib.contextmanager
def _opened(content: bytes, kind: str) -> Iterator[Any]:
    import av

    with av.open(io.BytesIO(content), format=kind) as opened:
        if not opened.streams.video:
            raise RequestError("The file has no video.")
        stream = opened.streams.video[0]
        stream.codec_context.thread_count = 1
        _check_size(stream.codec_context.width, stream.codec_context.height)
        yield stream


def _decoded(stream: Any) -> Iterator[Any]:
    for frame in stream.container.decode(stream):
        _check_size(frame.width, frame.height)
        yield frame


def _picture(frame: Any) -> Image:
    from PIL import Image

    return Image.fromarray(frame.to_ndarray(format="rgb24"))


def _check_size(width: int, height: int) -> None:
    if not 0 < width * height <= MAX_PIXELS:
        raise RequestError(f"The video's frames have {width} x {height} pixels, at most {MAX_PIXELS:,} are read.")


def _container(content: bytes) -> str:
    """Return PyAV's name of the format that the file begins as. Raises RequestError if it is no video."""
    begin = content[:16]
    if begin[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free"):
        return "mp4"
    if begin[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if begin[:4] == b"RIFF" and begin[8:12] == b"AVI ":
        return "avi"
    if begin[:4] == b"GIF8":
        return "gif"
    raise RequestError(f"The video cannot be read (its type is not known): send {_CONTAINERS}.")


@contextlib.contextmanager
def _broken_files_are_refused() -> Iterator[None]:
    try:
        yield
    except (RequestError, MemoryError, GeneratorExit):
        raise
    except Exception as error:  # whatever decoders raise for broken files
        raise RequestError(
            f"The video cannot be read ({type(error).__name__}): send a whole file of type {_CONTAINERS}."
        ) from None
