"""What is known about a tower for sounds that transformers' modules compute: plain data, found by
fallback/audio_inspection.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HEARS = (
    "AudioFlamingo3ForConditionalGeneration",
    "FunAsrNanoForConditionalGeneration",
    "GlmAsrForConditionalGeneration",
    "MusicFlamingoForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
    "VoxtralForConditionalGeneration",
)
"""Architectures whose text model reads sounds among its tokens."""


@dataclass(frozen=True)
class HearingSpec:
    """A tower and a projector, by which a text model reads sounds among its tokens.

    Attributes:
        directory: The checkpoint's directory.
        architecture: The class that has the tower.
        audio_token: The token that stands for each of a sound's vectors.
        placeholder: The token that prompts have for each sound.
        outputs: Width of a sound's vectors.
        num_parameters: Number of weights that are loaded.
        rate: Samples a second of what the processor reads.
        longest_s: Longest sound, in seconds, that the processor reads whole.
        least_tokens, largest_tokens: Fewest and most tokens of a sound; the most are those of the longest one.
        elements: What the tower computes at once for the longest sound, in elements.
    """

    directory: str
    architecture: str
    audio_token: int
    placeholder: int
    outputs: int
    num_parameters: int
    rate: int
    longest_s: float
    least_tokens: int
    largest_tokens: int
    elements: int

    def most_tokens(self, replaced: Mapping[str, Any]) -> int:
        """Return the most tokens of a sound; settings of image processors change nothing about it."""
        return self.largest_tokens

    def activations(self, tokens: int, together: int) -> int:
        """Return the elements that a sound takes at once; sounds are computed one by one."""
        return self.elements
