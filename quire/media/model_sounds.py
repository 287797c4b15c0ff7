"""What a model makes of sounds among its tokens: from files or samples to what its tower takes."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import RequestError
from quire.foundation.config import Config
from quire.foundation.messages.to_engine import Medium, MediumTensor
from quire.media.audio_decode import MIN_SECONDS, check_soundfile, decode_audio, samples_of
from quire.media.placement import Marks
from quire.models.audio.hearing import read_hearing
from quire.models.audio.hearing_spec import HearingSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class ModelSounds:
    """Sounds for one model.

    Attributes:
        spec: The model's tower.
        limit: Most sounds of a prompt; None: as many as fit.
    """

    spec: HearingSpec
    limit: int | None = None

    @property
    def marks(self) -> Marks:
        """How prompts show sounds."""
        return Marks(self.spec.placeholder, self.spec.audio_token)

    @property
    def least_tokens(self) -> int:
        """Fewest tokens of a sound."""
        return self.spec.least_tokens

    def of_file(self, content: bytes) -> Medium:
        """Return the sound of a file. Raises RequestError if it cannot be read, or is longer than the model hears."""
        return self._medium(decode_audio(content, self.spec.rate, self.spec.longest_s))

    def of_samples(self, given: Any) -> Medium:
        """Return the sound of samples [n], or of a pair of samples and how many there are in a second. Raises
        RequestError for anything else, and for more than the model hears."""
        samples = samples_of(given, self.spec.rate)
        if not MIN_SECONDS * self.spec.rate <= len(samples) <= self.spec.longest_s * self.spec.rate:
            raise RequestError(f"A sound has from {MIN_SECONDS:g} to {self.spec.longest_s:,.0f} seconds here.")
        return self._medium(samples)

    def _medium(self, samples: NDArray[np.float32]) -> Medium:
        import numpy as np

        found = self._processor.inputs(samples)
        tokens = np.asarray(found.tokens, dtype=np.int32)
        (places,) = np.nonzero(tokens == self.spec.audio_token)
        count = int(places[-1] - places[0]) + 1
        tensors = {name: MediumTensor(each.dtype.str, each.shape, each.tobytes())
                   for name, each in found.tensors.items()}  # fmt: skip
        digest = sha256(f"sound {self.spec.architecture}\0".encode() + tokens.tobytes())
        for name, tensor in tensors.items():
            digest.update(f"\0{name} {tensor.dtype} {tensor.shape}\0".encode() + tensor.content)
        return Medium(
            digest.digest(),
            0,
            len(samples),
            count,
            b"",
            tensors=tensors,
            places=(places - places[0]).astype(np.int32).tobytes() if len(places) < count else b"",
            text=tokens.tobytes(),
            kind="audio",
        )

    def load_processor(self) -> None:
        """Load transformers' processor, which takes seconds, before the first sound is read."""
        _ = self._processor

    @cached_property
    def _processor(self) -> Any:
        """transformers' processor, which only processes load that read sounds."""
        module = importlib.import_module("quire.models.fallback.audio_processor")
        return module.CheckpointAudioProcessor(Path(self.spec.directory), self.spec.audio_token)


def load_model_sounds(config: Config) -> ModelSounds | None:
    """Return what a model makes of sounds among its tokens under resolved settings; None if it does not read them.

    Raises:
        ConfigError: soundfile or scipy is not installed.
    """
    directory = Path(config.model.model)
    limit = config.media.most_of("audio")
    if config.model.language_model_only or limit == 0 or not (directory / "config.json").is_file():
        return None
    spec = read_hearing(directory)
    if spec is None:
        return None
    check_soundfile()
    return ModelSounds(spec, limit)
