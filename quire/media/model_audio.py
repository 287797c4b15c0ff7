"""What a model makes of sounds: from files or samples to what its encoder takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import RequestError
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import Medium
from quire.media.audio_decode import MAX_SECONDS, check_soundfile, decode_audio, samples_of
from quire.models.audio.audio_spec import SpeechSpec, read_speech

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire.media.log_mel import LogMel

    Features = NDArray[np.float32]


@dataclass(frozen=True)
class ModelAudio:
    """Sounds for one model.

    Attributes:
        spec: The model's encoder.
    """

    spec: SpeechSpec

    def read(self, content: bytes, *, pads_short: bool) -> Medium:
        """Return the whole sound of a file, with features [mels, n] of which the encoder reads some at a time.

        Args:
            content: The file.
            pads_short: Whether silence follows sounds that are shorter than what the encoder reads.

        Raises:
            RequestError: The file cannot be read.
        """
        samples = decode_audio(content, self.spec.mel.rate, MAX_SECONDS)
        features = self._features(samples, pads_short=pads_short)
        mels, frames = features.shape
        return Medium(b"", mels, frames, len(samples), features.tobytes())

    def of_samples(self, given: Any) -> Medium:
        """Return the sound of samples [n], or of a pair of samples and how many there are in a second; silence follows
        them. Raises RequestError for anything else, and for more than the encoder reads."""
        samples = samples_of(given, self.spec.mel.rate)
        if not 0 < len(samples) <= self.spec.samples:
            raise RequestError(f"Audio has 1 to {self.spec.samples:,} samples at {self.spec.mel.rate:,} a second here.")
        return self.medium(self._features(samples, pads_short=True))

    def medium(self, features: Features) -> Medium:
        """Return features [mels, n] as the encoder takes them, with zeros behind them."""
        import numpy as np

        mels, frames = self.spec.mel.mels, self.spec.frames
        assert features.shape[0] == mels and features.shape[1] <= frames, "more than the encoder reads"
        whole = np.zeros((mels, frames), np.float32)
        whole[:, : features.shape[1]] = features
        content = whole.tobytes()
        digest = sha256(f"log-mel {mels} {frames}\0".encode() + content).digest()
        return Medium(digest, mels, frames, 1, content)

    def _features(self, samples: NDArray[np.float32], *, pads_short: bool) -> Features:
        import numpy as np

        missing = self.spec.samples - len(samples)
        return self._log_mel(np.pad(samples, (0, missing)) if pads_short and missing > 0 else samples)

    @cached_property
    def _log_mel(self) -> LogMel:
        from quire.media.log_mel import LogMel  # which imports numpy

        return LogMel(self.spec.mel)


def load_model_audio(config: Config) -> ModelAudio | None:
    """Return what a model makes of sounds under resolved settings; None if it cannot hear.

    Raises:
        ConfigError: soundfile or scipy is not installed.
        CheckpointError: The checkpoint's settings of features make no sense.
    """
    directory = Path(config.model.model)
    spec = read_speech(directory) if (directory / "config.json").is_file() else None
    if spec is None:
        return None
    check_soundfile()
    return ModelAudio(spec)
