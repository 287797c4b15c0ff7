"""How models that read sounds among their tokens are asked to write what is said. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TranscriptionForm:
    """What a model is trained to read and to write for a transcript.

    Attributes:
        before, behind: Texts around a sound's placeholder.
        language: What follows where the language is known, with `{code}` or `{name}` in it.
        last: What stands behind that, whether it is known or not.
        marker: The text behind which the transcript begins, where the model tells the language first; empty: it
            begins at once.
    """

    before: str
    behind: str
    language: str
    last: str = ""
    marker: str = ""

    def prompt(self, placeholder: str, code: str | None, name: str) -> str:
        """Return the prompt for a sound in the language of a code and a name; without a code it is not known."""
        told = self.language.format(code=code, name=name) if code else ""
        return self.before + placeholder + self.behind + told + self.last


TRANSCRIBES = {
    "Qwen3ASRForConditionalGeneration": TranscriptionForm(
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|audio_start|>",
        "<|audio_end|><|im_end|>\n<|im_start|>assistant\n",
        "language {name}<asr_text>",
        marker="<asr_text>",
    ),
    "VoxtralForConditionalGeneration": TranscriptionForm(
        "<s>[INST][BEGIN_AUDIO]", "[/INST]", "lang:{code}", last="[TRANSCRIBE]"
    ),
}
"""By architecture: as transformers' `apply_transcription_request` writes it for Qwen3-ASR, and mistral-common for
Voxtral."""
