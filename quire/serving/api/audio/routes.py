"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import QuireError, RequestError
from quire.foundation.config import environment
from quire.serving.api.audio.chat_transcripts import ChatSpeech, ChatTranscript
from quire.serving.api.audio.form import TranscriptionRequest, read_form
from quire.serving.api.audio.languages import NAMES
from quire.serving.api.audio.segments import Segment
from quire.serving.api.audio.transcripts import Speech, Transcript
from quire.serving.api.error_responses import error_body
from quire.serving.api.request_work import cancel_on_disconnect
from quire.serving.api.serving import Serving, json_response
from quire.serving.api.stream_response import EVENT_STREAM
from quire.text.speech_tokens import Task

AUDIO_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"multipart/form-data": {"schema": {"$ref": "#/components/schemas/TranscriptionRequest"}}},
    }
}


def add_audio(app: FastAPI, serving: Serving) -> None:
    @app.post(AUDIO_PATHS[0], openapi_extra=_BODY, tags=["audio"])
    async def transcribe(request: Request) -> Response:
        """Write what is said in a sound."""
        return await _answer(serving, request, "transcribe")

    @app.post(AUDIO_PATHS[1], openapi_extra=_BODY, tags=["audio"])
    async def translate(request: Request) -> Response:
        """Write in English what is said in a sound."""
        return await _answer(serving, request, "translate")


async def _answer(serving: Serving, request: Request, task: Task) -> Response:
    speech = _check_hears(serving.speech)
    serving.refuse_if_full(request)
    fields, content = await read_form(request, environment.max_audio_bytes())
    return await cancel_on_disconnect(request, _transcribe(serving, speech, request, fields, content, task))


async def _transcribe(
    serving: Serving,
    speech: Speech | ChatSpeech,
    request: Request,
    fields: TranscriptionRequest,
    content: bytes,
    task: Task,
) -> Response:
    serving.accept_queued(request, fields)
    serving.session.check_room(1, 1)
    kind: Any = ChatTranscript if isinstance(speech, ChatSpeech) else Transcript
    transcript: Transcript | ChatTranscript = kind(speech, serving.session, fields, task, _options(fields))
    await transcript.read(content)
    if fields.stream:
        return serving.streamed(TranscriptStream(transcript, usage=bool(fields.stream_include_usage)))
    try:
        segments = await transcript.written()
    finally:
        transcript.close()
    match fields.format:
        case "text":
            return Response(transcript.text + "\n", media_type="text/plain")
        case "srt":
            return Response(_captions(segments, _srt), media_type="text/plain")
        case "vtt":
            return Response("WEBVTT\n\n" + _captions(segments, _vtt), media_type="text/plain")
        case "verbose_json":
            return json_response(_verbose(transcript, segments, task))
        case _:
            return json_response({"text": transcript.text, "usage": _usage(transcript)})


def _check_hears(speech: Speech | ChatSpeech | None) -> Speech | ChatSpeech:
    """Return what is known about the model. Raises RequestError if it cannot hear."""
    if speech is None:
        raise RequestError(
            "This model cannot hear: serve a Whisper model, such as openai/whisper-large-v3-turbo, for transcripts.",
            param="model",
        )
    return speech


def _options(fields: TranscriptionRequest) -> dict[str, Any]:
    """Return arguments of `EngineSession.add_request`; a transcript is several short requests."""
    return {name: value for name, value in fields.queue_options().items() if name != "collectors"}


def _usage(transcript: Transcript | ChatTranscript) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(transcript.duration)}


def _verbose(transcript: Transcript | ChatTranscript, segments: Sequence[Segment], task: Task) -> dict[str, Any]:
    code = "en" if transcript.language is None else transcript.language
    return {
        "task": task,
        "language": NAMES.get(code, code),
        "duration": round(transcript.duration, 2),
        "text": transcript.text,
        "segments": [segment.body(number) for number, segment in enumerate(segments)],
        "usage": _usage(transcript),
    }


def _captions(segments: Sequence[Segment], write: Callable[[int, Segment], str]) -> str:
    return "".join(write(number, segment) for number, segment in enumerate(segments, 1))


def _srt(number: int, segment: Segment) -> str:
    times = f"{_time(segment.start)} --> {_time(segment.end)}".replace(".", ",")
    return f"{number}\n{times}\n{_line(segment)}\n\n"


def _vtt(number: int, segment: Segment) -> str:
    return f"{_time(segment.start)} --> {_time(segment.end)}\n{_line(segment)}\n\n"


def _line(segment: Segment) -> str:
    """Return the text of a caption, in which an arrow would be a time."""
    return segment.text.strip().replace("-->", "->")


def _time(seconds: float) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}.{rest % 1000:03d}"


class TranscriptStream:
    """Writes a transcript as OpenAI's events.

    Args:
        transcript: What is written.
        usage: Whether the last event has counts of tokens.
    """

    media_type = EVENT_STREAM

    def __init__(self, transcript: Transcript | ChatTranscript, *, usage: bool) -> None:
        self.finished = False
        self._transcript = transcript
        self._usage = usage
        self._deltas: AsyncIterator[str] = transcript.deltas()

    async def wait(self) -> None:
        """Return at once: errors are events of the stream."""

    def close(self) -> None:
        """Abort what still runs."""
        self._transcript.close()

    async def next(self, write_now: Callable[[bytes], bool]) -> bytes:
        """Return the next event, or the last one."""
        try:
            async for delta in self._deltas:
                if delta:
                    return _event({"type": "transcript.text.delta", "delta": delta})
        except QuireError as error:
            self.finished = True
            return _event(error_body(error))
        self.finished = True
        last: dict[str, Any] = {"type": "transcript.text.done", "text": self._transcript.text}
        if self._usage:
            given, made = self._transcript.prompt_tokens, self._transcript.completion_tokens
            counts = {"input_tokens": given, "output_tokens": made, "total_tokens": given + made}
            last["usage"] = {"type": "tokens", **counts}
        return _event(last)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
