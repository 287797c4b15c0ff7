"""Has a model that reads sounds among its tokens write what is said in one."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.errors import RequestError
from quire.media.model_sounds import ModelSounds
from quire.models.audio.transcription import TRANSCRIBES, TranscriptionForm
from quire.serving.api.audio.form import TranscriptionRequest
from quire.serving.api.audio.languages import CODES, NAMES
from quire.serving.api.audio.segments import Segment
from quire.serving.api.media import AskedMedia, RequestMedia
from quire.serving.api.prompt_renderer import PromptRenderer
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.schemas.chat import MediumPart
from quire.serving.api.session.session import EngineSession
from quire.text.deltas import SequenceDelta
from quire.text.speech_tokens import Task


@dataclass(frozen=True)
class ChatSpeech:
    """What a server knows about a model of chats that writes transcripts.

    Attributes:
        form: How it is asked.
        rate: Samples a second that it reads.
        media: Reads sounds.
        renderer: Makes tokens of texts.
    """

    form: TranscriptionForm
    rate: int
    media: RequestMedia
    renderer: PromptRenderer

    @classmethod
    def of(cls, sounds: ModelSounds | None, media: RequestMedia, renderer: PromptRenderer) -> ChatSpeech | None:
        """Return what is known about a model that reads sounds; None if it is not known how to ask for transcripts."""
        form = None if sounds is None else TRANSCRIBES.get(sounds.spec.architecture)
        return None if sounds is None or form is None else cls(form, sounds.spec.rate, media, renderer)


class ChatTranscript:
    """One request's transcript, written as it is read.

    Args:
        speech: What the server knows about the model.
        session: The engines.
        fields: The request.
        task: What is written.
        options: Arguments of `EngineSession.add_request`.

    Attributes:
        language: The code of the language that the request names; None: the model finds it.
        duration: Of the sound, in seconds, once it is read.
        prompt_tokens, completion_tokens: Of the one prompt.

    Raises:
        RequestError: The request asks for something that such models do not write.
    """

    def __init__(
        self,
        speech: ChatSpeech,
        session: EngineSession,
        fields: TranscriptionRequest,
        task: Task,
        options: dict[str, Any],
    ) -> None:
        if task != "transcribe":
            raise RequestError("This model does not translate: ask for it in a chat, with the sound.", param="model")
        if fields.timestamps:
            raise RequestError(
                "This model tells no times: ask for response_format=json or text, or serve a Whisper model.",
                param="response_format",
            )
        if fields.prompt:
            raise RequestError("This model reads no prompt beside a sound: leave it out.", param="prompt")
        asked = (fields.language or "").lower()
        self.language = CODES.get(asked, asked) or None
        if self.language is not None and self.language not in NAMES:
            raise RequestError(f"language '{asked[:32]}' is not known: send an ISO 639-1 code.", param="language")
        self._speech = speech
        self._session = session
        self._options = options
        self._params = msgspec.structs.replace(fields.sampling(logprobs=False), detokenize=True)
        self._running: RequestChoices | None = None
        self._tokens = list[int]()
        self.duration = 0.0
        self.prompt_tokens = self.completion_tokens = 0
        self._text = ""

    @property
    def text(self) -> str:
        """All that is said so far."""
        return self._text.strip()

    async def read(self, content: bytes) -> None:
        """Read the sound of a file. Raises RequestError if it cannot be read, or is longer than the model hears."""
        speech, longest = self._speech, self._session.input_processor.longest
        placeholder = await speech.renderer.decode([speech.media.placeholders["audio"]])
        name = NAMES.get(self.language or "", "").title()
        prompt = await speech.renderer.encode(speech.form.prompt(placeholder, self.language, name), False, longest)
        part = MediumPart("file", f"data:audio;base64,{base64.b64encode(content).decode()}", kind="audio")
        self._tokens, self._options["media"] = await speech.media.placed(prompt, [part], AskedMedia())
        self.duration = self._options["media"][0].medium.width / speech.rate
        self._session.stats.http.audio_seconds += self.duration
        if self._params.max_tokens is None:
            rest = max(1, longest - len(self._tokens))
            self._params = msgspec.structs.replace(self._params, max_tokens=rest)

    async def written(self) -> list[Segment]:
        """Write all that is said; no segments are known."""
        async for _ in self.deltas():
            pass
        return []

    async def deltas(self) -> AsyncIterator[str]:
        """Yield what the text gains. What the model says about the language stands before its marker, and is left
        out."""
        marker = "" if self.language is not None else self._speech.form.marker
        held = ""
        async for gained in self._gains():
            if marker:
                held += gained
                _, found, gained = held.partition(marker)
                if not found:
                    continue
                marker = held = ""
            self._text += gained
            yield gained
        self._text += held  # without a marker all of it was said
        yield held

    def close(self) -> None:
        """Abort what still runs."""
        if self._running is not None:
            self._running.close()
            self._running = None

    async def _gains(self) -> AsyncIterator[str]:
        collector = await self._session.add_request([self._tokens], self._params, **self._options)
        self._running = choices = RequestChoices(self._session, collector, self._speech.renderer.tokenizer)
        came = list[str]()

        def on_delta(index: int, delta: SequenceDelta) -> bool:
            if (gained := choices.process(index, delta)) is not None:
                came.append(gained.text)
            return False

        try:
            while not choices.finished:
                for index, delta in await choices.read(on_delta):
                    on_delta(index, delta)
                ready, came[:] = "".join(came), []
                self.completion_tokens = choices.completion_tokens
                yield ready
        finally:
            self.prompt_tokens = choices.prompt_tokens
            self.close()
