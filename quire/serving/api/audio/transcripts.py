"""Has a model write what is said in a sound, piece by piece."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.errors import RequestError
from quire.foundation.messages.to_engine import Medium
from quire.foundation.messages.workers import TokenLogprobs
from quire.media.model_audio import ModelAudio
from quire.sampling_params import SamplingParams
from quire.serving.api.audio.form import TranscriptionRequest
from quire.serving.api.audio.languages import CODES
from quire.serving.api.audio.segments import Segment, compression_ratio, cut
from quire.serving.api.large_requests.readers import LargeRequestReaders, ReadAudio
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.session.session import EngineSession
from quire.text.deltas import ChoiceDelta, SequenceDelta
from quire.text.speech_tokens import SpeechTokens, Task
from quire.text.text_stream import TextStream
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Speech:
    """What a server knows about a model that hears.

    Attributes:
        audio: What the model makes of sounds.
        marks: Its tokens.
        tokenizer: Its tokenizer.
        readers: Processes that read files.
    """

    audio: ModelAudio
    marks: SpeechTokens
    tokenizer: Tokenizer
    readers: LargeRequestReaders

    def language(self, asked: str | None, task: Task) -> str | None:
        """Return the code of the language that a request names; None: it is detected, or English alone is written.
        Raises RequestError for languages and tasks that the model does not know."""
        languages = self.marks.languages
        if task == "translate" and "translate" not in self.marks.tasks:
            raise RequestError("This model does not translate: serve a multilingual Whisper model.", param="model")
        if not asked:
            return None
        code = CODES.get(asked.lower(), asked.lower())
        if not languages and code == "en":
            return None
        if code not in languages:
            known = ", ".join(sorted(languages)) or "en"
            raise RequestError(f"language '{asked[:32]}' is not known to this model: {known}.", param="language")
        return code

    def before(self, prompt: str | None, longest: int) -> list[int]:
        """Return the tokens of what was said before, the last ones if there are many, as Whisper's own code does."""
        if not prompt or self.marks.previous is None:
            return []
        tokens = self.tokenizer.encode(" " + prompt.strip(), add_special_tokens=False)
        if any(token >= self.marks.end for token in tokens):
            raise RequestError("prompt must not have special tokens.", param="prompt")
        return tokens[-(longest // 2 - 1) :]


class Transcript:
    """One request's transcript, written as it is read.

    Args:
        speech: What the server knows about the model.
        session: The engines.
        fields: The request.
        task: What is written.
        options: Arguments of `EngineSession.add_request`.

    Attributes:
        language: The code of the language; None in models of English.
        duration: Of the sound, in seconds, once it is read.
        prompt_tokens, completion_tokens: Of all pieces so far.
        words: All tokens of the text so far.
    """

    def __init__(
        self, speech: Speech, session: EngineSession, fields: TranscriptionRequest, task: Task, options: dict[str, Any]
    ) -> None:
        self._speech = speech
        self._session = session
        self._task: Task = task
        self._options = options
        self._reports = fields.format == "verbose_json"
        self._asks_times = fields.timestamps
        self._params = fields.sampling(logprobs=self._reports)
        self._before = speech.before(fields.prompt, session.input_processor.longest)
        self._running: RequestChoices | None = None
        self._sound: Medium
        self.language = speech.language(fields.language, task)
        self.duration = 0.0
        self.prompt_tokens = self.completion_tokens = 0
        self.words = list[int]()

    @property
    def text(self) -> str:
        """All that is said so far."""
        return self._speech.tokenizer.decode(self.words).strip()

    async def read(self, content: bytes) -> None:
        """Read the sound of a file. Raises RequestError if it cannot be read."""
        answer = await self._speech.readers.ask(ReadAudio(content, pads_short=not self._asks_times))
        assert answer.medium is not None
        self._sound = answer.medium
        self.duration = answer.medium.count / self._speech.audio.spec.mel.rate
        self._session.stats.http.audio_seconds += self.duration

    async def written(self) -> list[Segment]:
        """Write all that is said, and return its segments."""
        return [segment async for segment in self.segments()]

    async def segments(self) -> AsyncIterator[Segment]:
        """Write one piece after the other, and yield its segments."""
        speech, seek, number = self._speech, 0, 0
        frames, step = self._sound.width, speech.audio.spec.frames
        times = self._times
        with self._session.requests.keep_open():
            while seek < frames:
                source = self._piece(seek)
                await self._detect(source)
                made = await self._write(source, timestamps=times, seed=number)
                tokens = [token for token in made.tokens if token != speech.marks.end]
                window = min(step, frames - seek)
                spans, behind = cut(tokens, window, speech.marks) if times else ([(0, window // 2, tokens)], window)
                for segment in self._described(spans, seek, made, await self._silence(source)):
                    self.words += speech.marks.words(segment.tokens)
                    yield segment
                seek, number = seek + behind, number + 1

    async def deltas(self) -> AsyncIterator[str]:
        """Write one piece after the other, and yield what the text gains: tokens as they come where the sound is one
        piece, and otherwise segments, since what follows the last one may be written anew."""
        stream = TextStream(self._speech.tokenizer, SamplingParams())
        if self._times:
            async for segment in self.segments():
                yield stream.push(self._speech.marks.words(segment.tokens), final=False).text
        else:
            source = self._piece(0)
            with self._session.requests.keep_open():
                await self._detect(source)
                async for gained in self._gains(source, timestamps=False, seed=0):
                    words = self._speech.marks.words(gained.tokens)
                    self.words += words
                    yield stream.push(words, final=False).text
        yield stream.push([], final=True).text

    def close(self) -> None:
        """Abort what still runs."""
        if self._running is not None:
            self._running.close()
            self._running = None

    @property
    def _times(self) -> bool:
        """Whether timestamps are written: they are asked for, or say where pieces end."""
        return self._asks_times or self._sound.width > self._speech.audio.spec.frames

    def _piece(self, seek: int) -> Medium:
        import numpy as np

        whole = np.frombuffer(self._sound.pixels, np.float32).reshape(self._sound.height, self._sound.width)
        return self._speech.audio.medium(whole[:, seek : seek + self._speech.audio.spec.frames])

    async def _detect(self, source: Medium) -> None:
        """Find the language of the first piece, unless the request names it."""
        languages = self._speech.marks.languages
        if self.language is not None or not languages:
            return
        params = SamplingParams(
            temperature=0.0, max_tokens=1, allowed_token_ids=list(languages.values()), ignore_eos=True, detokenize=False
        )
        found = await self._collected([self._speech.marks.start], params, source)
        codes = {token: code for code, token in languages.items()}
        self.language = codes[found.tokens[0]]

    async def _silence(self, source: Medium) -> float:
        """Return the probability that nothing is said in a piece, if it is reported."""
        if not self._reports:
            return 0.0
        params = SamplingParams(
            temperature=0.0, max_tokens=1, logprob_token_ids=[self._speech.marks.no_speech], ignore_eos=True,
            detokenize=False,
        )  # fmt: skip
        found = await self._collected([self._speech.marks.start], params, source)
        return math.exp(found.logprobs[0].top_logprobs[0])

    async def _write(self, source: Medium, *, timestamps: bool, seed: int) -> ChoiceDelta:
        whole = ChoiceDelta()
        async for gained in self._gains(source, timestamps=timestamps, seed=seed):
            whole.add(gained)
        return whole

    async def _gains(self, source: Medium, *, timestamps: bool, seed: int) -> AsyncIterator[ChoiceDelta]:
        marks, params = self._speech.marks, self._params
        prompt = marks.prompt(self.language, self._task, self._before, timestamps=timestamps)
        if params.seed is not None:
            params = msgspec.structs.replace(params, seed=params.seed + seed)
        async for gained in self._run(prompt, params, source, transcript=marks.rules_of(timestamps=timestamps)):
            self.completion_tokens += len(gained.tokens)
            yield gained
        self.prompt_tokens += len(prompt)

    async def _collected(self, prompt: Sequence[int], params: SamplingParams, source: Medium) -> ChoiceDelta:
        whole = ChoiceDelta()
        async for gained in self._run(prompt, params, source):
            whole.add(gained)
        return whole

    async def _run(
        self, prompt: Sequence[int], params: SamplingParams, source: Medium, **more: Any
    ) -> AsyncIterator[ChoiceDelta]:
        """Have an engine go on with a prompt while it hears a piece, and yield what it writes."""
        collector = await self._session.add_request(
            [prompt], params, source=source, continuing=True, **more, **self._options
        )
        self._running = choices = RequestChoices(self._session, collector, None)
        came = list[ChoiceDelta]()

        def on_delta(index: int, delta: SequenceDelta) -> bool:
            if (gained := choices.process(index, delta)) is not None:
                came.append(gained)
            return False

        try:
            while not choices.finished:
                for index, delta in await choices.read(on_delta):
                    on_delta(index, delta)
                ready, came[:] = list(came), []
                for gained in ready:
                    yield gained
        finally:
            self.close()

    def _described(self, spans: Sequence[Any], seek: int, made: ChoiceDelta, silence: float) -> list[Segment]:
        """Return a piece's segments."""
        speech, hop = self._speech, self._speech.audio.spec.mel.hop / self._speech.audio.spec.mel.rate
        text = speech.tokenizer.decode(speech.marks.words(made.tokens))
        about = {
            "temperature": self._params.temperature,
            "avg_logprob": _mean(made.logprobs),
            "compression_ratio": compression_ratio(text),
            "no_speech_prob": silence,
        }
        return [
            Segment(
                seek,
                round((seek + 2 * start) * hop, 2),
                round((seek + 2 * end) * hop, 2),
                tokens,
                speech.tokenizer.decode(speech.marks.words(tokens)),
                **about,
            )
            for start, end, tokens in spans
        ]


def _mean(logprobs: Sequence[TokenLogprobs]) -> float:
    return sum(each.logprob for each in logprobs) / len(logprobs) if logprobs else 0.0
