"""transformers' processor of a checkpoint: sounds to the tensors that its model's tower takes, and to tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoFeatureExtractor, AutoTokenizer

from quire.errors import CheckpointError, RequestError
from quire.models.fallback.image_processor import LOADING, ImageInputs, arrays_of, build_processor, processor_class

_VOXTRAL = "VoxtralProcessor"


class CheckpointAudioProcessor:
    """A checkpoint's own processor of sounds, by transformers' class for it. No code of the checkpoint is run.

    Args:
        directory: The checkpoint.
        audio_token: The token that stands for a vector of a sound.

    Attributes:
        rate: Samples a second that it reads.

    Raises:
        CheckpointError: transformers has no such processor, or it cannot be built.
    """

    def __init__(self, directory: Path, audio_token: int) -> None:
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(directory, **LOADING)
            features: Any = AutoFeatureExtractor.from_pretrained(directory, **LOADING)  # type: ignore[no-untyped-call]
            kind = processor_class(directory)
            if kind is not None and kind.__name__ == _VOXTRAL:
                self.processor: Any = VoxtralLayout(features, tokenizer, kind.audio_kwargs)
            else:
                parts = {"tokenizer": tokenizer, "feature_extractor": features}
                self.processor = build_processor(directory, kind, parts)
        except CheckpointError:
            raise
        except Exception as error:  # transformers checks with errors of many kinds
            raise CheckpointError(f"transformers cannot build the checkpoint's audio processor: {error}") from error
        self.rate = int(features.sampling_rate)
        text = getattr(self.processor, "audio_token", None)
        self._text = str(getattr(text, "content", text) or tokenizer.convert_ids_to_tokens(audio_token))
        self.placeholder = int(tokenizer.convert_tokens_to_ids(self._text))
        self._audio_token = audio_token

    def inputs(self, samples: NDArray[np.float32]) -> ImageInputs:
        """Return tokens and tensors of a sound, samples [n] of `rate` a second; `input_ids` is one of the tensors.

        Raises:
            RequestError: The processor refuses it, or makes no tokens of it.
        """
        options = {"sampling_rate": self.rate, "add_special_tokens": False, "return_tensors": "pt"}
        try:
            found = self.processor(text=[self._text], audio=[samples], **options)
        except Exception as error:  # processors check with errors of many kinds
            first = (str(error).strip().splitlines() or [""])[0]
            raise RequestError(
                f"The model's processor cannot read a sound of {len(samples) / self.rate:.2f} s "
                f"({type(error).__name__}: {first})."
            ) from None
        tokens = [int(each) for each in found["input_ids"][0]]
        if self._audio_token not in tokens:
            raise RequestError(f"A sound of {len(samples) / self.rate:.2f} s is too short for this model.")
        return ImageInputs(tokens, arrays_of(found))


class VoxtralLayout:
    """Voxtral's layout of a sound: pieces of 30 s, the last of which is filled with silence, with as many tokens each
    (Liu et al. 2025, "Voxtral", section 2.1).

    Args:
        features: The feature extractor.
        tokenizer: Knows the token.
        settings: Those that transformers' processor has for sounds.
    """

    audio_token = "[AUDIO]"
    _FRAMES_OF_TOKEN = 8
    """Features that become one vector: two of them one state of the encoder, and four states one vector."""

    def __init__(self, features: Any, tokenizer: Any, settings: dict[str, Any]) -> None:
        self._features = features
        self._token = tokenizer.convert_tokens_to_ids(self.audio_token)
        self._settings = {name: value for name, value in settings.items() if name != "max_source_positions"}
        self._piece = int(settings["max_source_positions"])

    def __call__(self, *, text: list[str], audio: list[NDArray[np.float32]], **_: Any) -> dict[str, Any]:
        """Return tensors and tokens of one sound, whose placeholder is all of the text."""
        if text != [self.audio_token]:
            raise ValueError(f"{text} is not {self.audio_token}")
        found = self._features(audio[0], **self._settings)["input_features"]
        pieces = found.reshape(self._features.feature_size, -1, self._piece).transpose(0, 1)
        tokens = [self._token] * (len(pieces) * self._piece // self._FRAMES_OF_TOKEN)
        return {"input_ids": [tokens], "input_features": pieces.contiguous()}
