"""Reads what a model's encoder of sounds is from config.json. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError
from quire.models.config_file import ConfigFile, processor_settings

SPEECH = ("WhisperForConditionalGeneration",)
"""Architectures whose decoder writes what their encoder of sounds hears."""


@dataclass(frozen=True)
class MelSpec:
    """How samples become log-mel features.

    Attributes:
        rate: Samples a second.
        window: Samples of the window that one feature is made of.
        hop: Samples from one window to the next.
        mels: Numbers of a feature.
    """

    rate: int
    window: int
    hop: int
    mels: int


@dataclass(frozen=True)
class SpeechSpec:
    """Whisper's encoder (Radford et al. 2022, section 2.2).

    Attributes:
        mel: How its features are made.
        hidden: Width of its stream.
        width: Width between the products of its MLPs.
        layers: Number of its layers.
        heads: Number of its heads.
        activation: config.json's name of the activation of its MLPs.
        length: How many states it makes, of twice as many features.
        readers: Number of the decoder's layers, each of which makes keys and values of the states.
    """

    mel: MelSpec
    hidden: int
    width: int
    layers: int
    heads: int
    activation: str
    length: int
    readers: int

    @property
    def frames(self) -> int:
        """How many features it reads."""
        return 2 * self.length

    @property
    def samples(self) -> int:
        """How many samples these are made of."""
        return self.frames * self.mel.hop

    @property
    def num_parameters(self) -> int:
        """Number of weights that are loaded."""
        h = self.hidden
        convolutions = 3 * h * (self.mel.mels + h) + 2 * h
        layer = 4 * (h * h + h) + 2 * h * self.width + self.width + h + 4 * h
        return convolutions + self.length * h + self.layers * layer + 2 * h + self.readers * (2 * h * h + h)

    @property
    def activations(self) -> int:
        """Elements that one piece of audio takes while it is computed."""
        return self.frames * (self.mel.mels + self.hidden) + self.length * (8 * self.hidden + 2 * self.width)


def read_speech(directory: Path) -> SpeechSpec | None:
    """Return the encoder that a checkpoint's config.json describes; None if it has none.

    Raises:
        CheckpointError: A key makes no sense, or the files of features and model contradict each other.
    """
    fields = ConfigFile(directory / "config.json")
    names = fields.get("architectures", [])
    if not isinstance(names, list) or not any(name in SPEECH for name in names):
        return None
    settings = processor_settings(directory, "feature_extractor")
    mels = fields.count("num_mel_bins", 80)
    if settings.get("feature_size", mels) != mels:
        raise CheckpointError(
            f"preprocessor_config.json makes features of {settings['feature_size']!r} mels, and the model reads "
            f"{mels}: download both again."
        )
    mel = MelSpec(
        rate=_positive(settings, "sampling_rate", 16_000),
        window=_positive(settings, "n_fft", 400),
        hop=_positive(settings, "hop_length", 160),
        mels=mels,
    )
    return SpeechSpec(
        mel=mel,
        hidden=fields.count("d_model", 384),
        width=fields.count("encoder_ffn_dim", 1536),
        layers=fields.count("encoder_layers", 4),
        heads=fields.count("encoder_attention_heads", 6),
        activation=fields.choice("activation_function", ("gelu",), "gelu"),
        length=fields.count("max_source_positions", 1500),
        readers=fields.count("decoder_layers", 4),
    )


def _positive(settings: dict[str, Any], name: str, default: int) -> int:
    value = settings.get(name, default)
    if type(value) is not int or not 0 < value < 2**31:
        raise CheckpointError(f"preprocessor_config.json: {name} is {value!r}, it must be a positive integer.")
    return value
