"""Files of sounds to samples: one channel, of the rate that a model hears, bounded in length."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from types import ModuleType

    import numpy as np
    from numpy.typing import NDArray

    Samples = NDArray[np.float32]

MAX_SECONDS = 3_600.0
"""Longest audio, in seconds."""
MIN_SECONDS = 0.1
MAX_CHANNELS = 8
RATES = range(2_000, 384_001)
"""Rates of files that are read, in samples a second."""
MAX_SAMPLE = 1e4
"""Largest magnitude of a sample; files of whole numbers have at most 1."""
_BLOCK_S = 30
_READ = "WAV, FLAC, OGG or MP3"
_UNREADABLE = "The audio cannot be read ({why}): send a whole file of type {types}."


def decode_audio(content: bytes, rate: int, longest_s: float = MAX_SECONDS) -> Samples:
    """Return the samples [n] float32 of a file of WAV, FLAC, OGG or MP3, and with PyAV of MP4 or WebM.

    Channels are averaged, and other rates resampled by a polyphase filter (scipy.signal.resample_poly).

    Args:
        content: The file.
        rate: Samples a second of the result.
        longest_s: The longest audio that is read, in seconds.

    Raises:
        RequestError: The file is of another type, is broken, too short or too long, or has samples that are no numbers.
    """
    import numpy as np

    container = _container(content)
    if container is None:
        samples = _of_soundfile(content, rate, longest_s)
    else:
        samples = _of_av(content, container, rate, longest_s)
    if not np.isfinite(samples).all() or np.abs(samples).max(initial=0) > MAX_SAMPLE:
        raise RequestError("The audio has samples that are no loudness (NaN, infinite or above 10,000).", param="file")
    if len(samples) < MIN_SECONDS * rate:
        raise RequestError(f"The audio is shorter than {MIN_SECONDS:g} s: send a longer one.", param="file")
    return samples


def check_soundfile() -> None:
    """Raise a ConfigError if soundfile or scipy is not installed."""
    _soundfile()


def _soundfile() -> ModuleType:
    try:
        import scipy.signal  # noqa: F401
        import soundfile
    except (ImportError, OSError):
        raise ConfigError("Audio needs soundfile and scipy: pip install 'quire[audio]'.", param="model") from None
    module: ModuleType = soundfile
    return module


def _container(content: bytes) -> str | None:
    """Return PyAV's name of the format that the file begins as; None: soundfile reads it. Raises RequestError for
    neither."""
    begin = content[:16]
    if begin[:4] == b"RIFF" and begin[8:12] == b"WAVE":
        return None
    if begin[:4] in (b"fLaC", b"OggS", b"RF64") or begin[:3] == b"ID3":
        return None
    if begin[4:8] == b"ftyp":
        return "mp4"
    if begin[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if len(begin) > 1 and begin[0] == 0xFF and begin[1] & 0xE0 == 0xE0:
        return None if begin[1] & 0x06 else "aac"
    raise RequestError(_UNREADABLE.format(why="its type is not known", types=_types()), param="file")


def _types() -> str:
    try:
        import av  # noqa: F401
    except ImportError:
        return _READ
    return _READ.replace(" or", ",") + ", MP4 (M4A) or WebM"


@contextlib.contextmanager
def _broken_files_are_refused() -> Iterator[None]:
    try:
        yield
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # whatever decoders raise for broken files
        raise RequestError(_UNREADABLE.format(why=type(error).__name__, types=_types()), param="file") from None


def _of_soundfile(content: bytes, rate: int, longest_s: float) -> Samples:
    import numpy as np

    soundfile = _soundfile()
    with _broken_files_are_refused(), soundfile.SoundFile(io.BytesIO(content)) as file:
        own, channels = file.samplerate, file.channels
        _check_form(own, channels)
        blocks, most = list[Any](), longest_s * own
        while len(block := file.read(_BLOCK_S * own, dtype="float32", always_2d=True)):
            blocks.append(block.mean(axis=1, dtype=np.float32) if channels > 1 else block[:, 0])
            most -= len(block)
            _check_length(most, longest_s)
    return resampled(np.concatenate(blocks) if blocks else np.zeros(0, np.float32), own, rate)


def _of_av(content: bytes, container: str, rate: int, longest_s: float) -> Samples:
    import numpy as np

    try:
        import av
    except ImportError:
        raise RequestError(
            f"Audio of this type is not read by this server: send {_READ} (the server lacks the package av).",
            param="file",
        ) from None
    with _broken_files_are_refused(), av.open(io.BytesIO(content), format=container) as opened:
        if not opened.streams.audio:
            raise RequestError("The file has no audio.", param="file")
        blocks, most = list[Any](), longest_s * rate
        for block in _frames(av, opened, rate):
            blocks.append(block)
            most -= len(block)
            _check_length(most, longest_s)
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32)


def _frames(av: Any, opened: Any, rate: int) -> Iterable[Samples]:
    stream = opened.streams.audio[0]
    _check_form(stream.codec_context.sample_rate or RATES.start, stream.codec_context.channels or 1)
    resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
    for frame in opened.decode(stream):
        for made in resampler.resample(frame):
            yield made.to_ndarray()[0]
    for made in resampler.resample(None):
        yield made.to_ndarray()[0]


def _check_form(rate: int, channels: int) -> None:
    if rate not in RATES:
        raise RequestError(
            f"The audio has {rate} samples a second, and from {RATES.start:,} to {RATES.stop - 1:,} are read.",
            param="file",
        )
    if channels > MAX_CHANNELS:
        raise RequestError(f"The audio has {channels} channels, and at most {MAX_CHANNELS} are read.", param="file")


def _check_length(samples_left: float, longest_s: float) -> None:
    if samples_left < 0:
        raise RequestError(f"The audio is longer than {longest_s:,.0f} s: send it in parts.", param="file")


def samples_of(given: Any, rate: int) -> Samples:
    """Return samples [n] float32 of `rate` a second of such samples, or of a pair of samples and their rate. Raises
    RequestError for anything else."""
    import numpy as np

    samples, own = given if isinstance(given, tuple) and len(given) == 2 else (given, rate)
    samples = np.asarray(samples)
    if samples.ndim != 1 or not np.issubdtype(samples.dtype, np.floating) or not isinstance(own, int | float):
        raise RequestError("Audio is an array [samples] of floats, or a pair of such an array and its rate.")
    if not np.isfinite(samples).all() or int(own) not in RATES:
        raise RequestError(f"Audio has finite samples, {RATES.start:,} to {RATES.stop - 1:,} a second.")
    return resampled(samples.astype(np.float32), int(own), rate)


def resampled(samples: Samples, own: int, rate: int) -> Samples:
    """Return samples [n] of `own` a second as samples of `rate` a second."""
    if own == rate or not len(samples):
        return samples
    import numpy as np
    from scipy.signal import resample_poly

    common = math.gcd(own, rate)
    return np.asarray(resample_poly(samples, rate // common, own // common), np.float32)
