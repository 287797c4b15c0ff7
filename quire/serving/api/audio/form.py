"""The form of POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec
from pydantic.fields import FieldInfo
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from quire.errors import RequestError
from quire.sampling_params import SamplingParams
from quire.serving.api.request_body import check_fields
from quire.serving.api.schemas.known_fields import IGNORED, FieldLists, optional
from quire.serving.api.schemas.sampling import RequestFields

UPLOAD_TIMEOUT_S = 600.0
_MAX_FIELDS = 64
_LISTS = ("timestamp_granularities", "include")
FORM_FIELDS = FieldLists(
    IGNORED,
    {
        "hotwords": ("",),
        "include": ([],),
        "known_speaker_names": ([],),
        "known_speaker_references": ([],),
        "to_language": (),
        "use_beam_search": (False, "false", "False"),
    },
)
"""Fields that OpenAI or vLLM know and these routes do not serve, with the values that ask for nothing."""
Format = Literal["json", "text", "srt", "verbose_json", "vtt"]


class TranscriptionRequest(RequestFields):
    """What is to be written of a sound."""

    file: Any = optional("WAV, FLAC, OGG, MP3, MP4 or WebM.")
    language: str | None = optional("Language of the sound, as ISO 639-1 code. Default: as it is heard.")
    prompt: str | None = optional("What was said before; guides style and spelling.")
    response_format: Format | None = optional("Default json.")
    timestamp_granularities: list[Literal["segment", "word"]] | None = optional("segment, with verbose_json.")
    chunking_strategy: Literal["auto"] | None = optional("Long sounds are always cut where the model says.")
    temperature: float | None = optional("Default 0, greedy.")
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_completion_tokens: int | None = optional("Most tokens of each 30 s.")
    vllm_xargs: dict[str, Any] | None = optional("For the server's logits processors.")
    stream_include_usage: bool | None = optional("Token counts at the end of a stream.")

    @property
    def format(self) -> Format:
        """The format of the answer."""
        return self.response_format or "json"

    @property
    def timestamps(self) -> bool:
        """Whether the answer tells when something is said."""
        return self.format in ("srt", "vtt", "verbose_json")

    def check(self) -> None:
        """Raise a RequestError for fields that contradict one another, or ask for what is not served."""
        granularities = self.timestamp_granularities or []
        if "word" in granularities:
            raise RequestError(
                "timestamp_granularities: the times of words are not served: ask for segment.",
                param="timestamp_granularities",
            )
        if granularities and self.format != "verbose_json":
            raise RequestError(
                "timestamp_granularities needs response_format=verbose_json.", param="timestamp_granularities"
            )
        if self.stream and self.format not in ("json", "text"):
            raise RequestError(f"{self.format} cannot be streamed: ask for json.", param="response_format")
        if self.stream_include_usage and not self.stream:
            raise RequestError("stream_include_usage needs stream=true.", param="stream_include_usage")
        self.check_stream_options()

    def sampling(self, *, logprobs: bool) -> SamplingParams:
        """Return checked parameters of each piece. Raises RequestError if a value is out of its range."""
        names = ("top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty")
        given = {name: getattr(self, name) for name in names}
        return SamplingParams.from_optional(
            **given,
            temperature=self.temperature or 0.0,
            max_tokens=self.max_completion_tokens,
            extra_args=self.vllm_xargs,
            logprobs=0 if logprobs else None,
            detokenize=False,
        )


async def read_form(request: Request, most_bytes: int) -> tuple[TranscriptionRequest, bytes]:
    """Return a form's fields and its file. Raises RequestError if a field or the file is wrong, and HTTPException if it
    is no form, or does not arrive."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise HTTPException(415, "Send the audio as multipart/form-data, with the fields 'file' and 'model'.")
    try:
        async with asyncio.timeout(UPLOAD_TIMEOUT_S), request.form(max_files=1, max_fields=_MAX_FIELDS) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise RequestError("'file' is required, as a file.", param="file")
            if (file.size or 0) > most_bytes:
                raise RequestError(
                    f"The file has {file.size or 0:,} bytes, and at most {most_bytes:,} are read: send a compressed "
                    "one, or parts (VLLM_MAX_AUDIO_CLIP_FILESIZE_MB).",
                    param="file",
                )
            content = await file.read()
            fields = check_fields(_values(form), TranscriptionRequest, FORM_FIELDS, request.app.state.unknown_fields)
    except TimeoutError:
        raise HTTPException(408, "The audio did not arrive in time.") from None
    except ClientDisconnect:
        raise RequestError("The upload broke off.") from None
    if not content:
        raise RequestError("The file is empty: send a sound.", param="file")
    fields.check()
    return fields, content


def _values(form: FormData) -> dict[str, Any]:
    """Return the fields of a form as a body has them: lists, numbers, booleans and objects instead of texts."""
    values = dict[str, Any]()
    for name in dict.fromkeys(form):
        if name == "file":
            continue
        plain = name.removesuffix("[]")
        given = form.getlist(name)
        if any(isinstance(each, UploadFile) for each in given):
            raise RequestError(f"{plain[:64]} must be no file: the audio is 'file'.", param=plain[:64])
        if plain != name or plain in _LISTS:
            values.setdefault(plain, []).extend(given)
            continue
        if len(given) > 1:
            raise RequestError(f"{plain[:64]} must be sent once.", param=plain[:64])
        values[name] = _typed(TranscriptionRequest.model_fields, name, str(given[0]))
    return values


def _typed(fields: Mapping[str, FieldInfo], name: str, text: str) -> Any:
    """Return the value that a text of a form stands for; a text that is wrong stays, and the schema refuses it."""
    field = fields.get(name)
    kinds = () if field is None else get_args(field.annotation) or (field.annotation,)
    if field is None or str in kinds or any(isinstance(value, str) for kind in kinds for value in get_args(kind)):
        return text
    if not text:
        return None
    try:
        value = msgspec.json.decode(text.lower() if bool in kinds else text)
    except msgspec.DecodeError:
        return text
    return float(value) if float in kinds and type(value) is int else value
