"""Files to samples and samples to features, compared with transformers' WhisperFeatureExtractor."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from quire.errors import RequestError
from quire.media.audio_decode import MAX_CHANNELS, decode_audio
from quire.media.log_mel import LogMel
from quire.models.audio.audio_spec import MelSpec
from tests.audio.checkpoints import RATE, file_of, sound


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("seconds", [0.1, 7.3])
def test_features_are_those_of_transformers(mels: int, seconds: float) -> None:
    """It has two ways, by torch in float32 and by numpy in float64; in float32 quiet mels are less exact."""
    from transformers import WhisperFeatureExtractor

    samples, extractor = sound(seconds), WhisperFeatureExtractor(feature_size=mels)
    expected = extractor(samples, sampling_rate=RATE, return_tensors="np", padding="longest").input_features[0]
    exact = extractor._np_extract_fbank_features(samples[None], "cpu")[0]
    made = LogMel(MelSpec(RATE, 400, 160, mels))(samples)
    assert made.shape == expected.shape
    assert made.dtype == np.float32
    assert np.abs(made - exact).max() < 1e-6
    assert np.abs(made - expected).max() < 1e-4


@pytest.mark.parametrize(
    ("kind", "options", "close"),
    [
        ("WAV", {}, 1e-7),
        ("WAV", {"subtype": "FLOAT"}, 0.0),
        ("WAV", {"subtype": "PCM_24"}, 1e-9),
        ("FLAC", {}, 1e-7),
        ("OGG", {}, 0.01),
        ("OGG", {"subtype": "OPUS"}, 0.1),
    ],
)
def test_files_are_read(kind: str, options: dict[str, Any], close: float) -> None:
    """To within so much of the sound's power."""
    samples = sound(1.5)
    read = decode_audio(file_of(samples, kind=kind, **options), RATE)
    assert len(read) == len(samples)
    assert ((read - samples) ** 2).sum() <= close * (samples**2).sum()


def test_mp3_is_read() -> None:
    samples = sound(1.5)
    read = decode_audio(file_of(samples, kind="MP3"), RATE)
    assert 1.4 * RATE < len(read) < 1.8 * RATE


@pytest.mark.parametrize(("kind", "codec"), [("mp4", "aac"), ("webm", "libopus")])
def test_what_pyav_reads_is_read_where_it_is_installed(kind: str, codec: str) -> None:
    av = pytest.importorskip("av")
    buffer, rate = io.BytesIO(), 48_000
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(sound(2.0, rate=rate)[None], format="flt", layout="mono")
        frame.sample_rate = rate
        container.mux([*stream.encode(frame), *stream.encode(None)])
    read = decode_audio(buffer.getvalue(), RATE)
    assert 1.9 * RATE < len(read) < 2.2 * RATE
    assert np.abs(read).max() > 0.05


@pytest.mark.parametrize("rate", [8_000, 24_000, 44_100, 48_000])
def test_other_rates_are_resampled_as_ffmpeg_does(rate: int) -> None:
    """To within a hundredth of the sound's power: filters near half of the rate differ."""
    av = pytest.importorskip("av")
    content = file_of(sound(2.0, rate=rate), rate, subtype="FLOAT")
    resampler, theirs = av.AudioResampler(format="flt", layout="mono", rate=RATE), []
    with av.open(io.BytesIO(content)) as container:
        for frame in [*container.decode(audio=0), None]:
            theirs += [made.to_ndarray()[0] for made in resampler.resample(frame)]
    ours, expected = decode_audio(content, RATE), np.concatenate(theirs)
    length = min(len(ours), len(expected))
    assert abs(len(ours) - len(expected)) <= 2
    difference = ((ours[:length] - expected[:length]) ** 2).sum()
    assert difference < 0.01 * (expected**2).sum()


def test_channels_are_averaged() -> None:
    left, right = sound(1.0, seed=1), sound(1.0, seed=2)
    both = np.stack([left, right], axis=1)
    assert np.allclose(decode_audio(file_of(both, subtype="FLOAT"), RATE), (left + right) / 2, atol=1e-6)


def _broken() -> dict[str, bytes]:
    whole = file_of(sound(1.0))
    infinite = sound(1.0)
    infinite[100] = np.inf
    many = np.zeros((RATE, MAX_CHANNELS + 1), np.float32)
    return {
        "empty": b"",
        "a text": b"hello there, this is no sound at all",
        "a header alone": whole[:44],
        "a broken header": whole[:20],
        "FLAC cut short": file_of(sound(1.0), kind="FLAC")[:60],
        "OGG of noise": b"OggS" + bytes(range(256)) * 20,
        "MP3 of noise": b"ID3" + bytes(range(256)) * 20,
        "MP4 of noise": b"\0\0\0\x20ftypM4A " + bytes(range(256)) * 20,
        "WebM of noise": b"\x1a\x45\xdf\xa3" + bytes(range(256)) * 20,
        "infinite": file_of(infinite, subtype="FLOAT"),
        "short": file_of(sound(0.05)),
        "too many channels": file_of(many),
        "a rate of 1": file_of(sound(1.0), 1),
    }


@pytest.mark.parametrize("kind", _broken())
def test_what_is_no_sound_is_refused(kind: str) -> None:
    with pytest.raises(RequestError, match=r"audio|Audio|file"):
        decode_audio(_broken()[kind], RATE)


def test_long_sounds_are_refused_before_all_is_read() -> None:
    with pytest.raises(RequestError, match="longer than 2 s"):
        decode_audio(file_of(sound(2.5)), RATE, longest_s=2.0)
