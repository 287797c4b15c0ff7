"""Holds every answer of the servers in tests against the types that clients of others read it with.

These are the models of the packages `openai`, `anthropic` and `ollama`, and of Open Responses
(`openresponses-types`), in the versions of constraints.txt. The packages themselves are lenient: they build their types
without looking at the values.
"""

from __future__ import annotations

import base64
import json
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import anthropic.types
import ollama
import openai.types as of_openai
import openresponses_types as open_responses
from openai.types import audio
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice as WholeChoice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.create_embedding_response import Usage as EmbeddingUsage
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses import response_text_delta_event as text_delta
from openai.types.responses import response_text_done_event as text_done
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import BaseModel, RootModel, TypeAdapter, ValidationError

from tests.api.answer_recorder import MAX_BYTES, Answer

_EVENTS = "text/event-stream"
_CLIENT_CALLS = ("apply_patch_call", "custom_tool_call", "local_shell_call", "shell_call")
_LINES = "application/x-ndjson"


class ListOf(BaseModel, extra="forbid"):
    """A page of things, as OpenAI's API lists them."""

    object: typing.Literal["list"]
    data: list[Any]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class OllamaError(BaseModel, extra="forbid"):
    """An error of Ollama's."""

    error: str


class OpenAIError(BaseModel, extra="forbid"):
    """An error of OpenAI's."""

    error: of_openai.ErrorObject


@dataclass(frozen=True)
class Kind:
    """What the answers of a route are.

    Attributes:
        whole: Types of an answer that comes whole; it must be of each.
        each: The type of what a list has.
        part: The type of an event or line of a stream.
    """

    whole: tuple[type[BaseModel], ...]
    each: type[BaseModel] | None = None
    part: type[BaseModel] | None = None


class Transcript(RootModel[audio.TranscriptionVerbose | audio.Transcription]):
    """json or verbose_json."""


class Translated(RootModel[audio.TranslationVerbose | audio.Translation]):
    """json or verbose_json."""


class TranscriptEvent(RootModel[audio.TranscriptionTextDeltaEvent | audio.TranscriptionTextDoneEvent]):
    """An event of a streamed transcript or translation."""


_RESPONSE = Kind((Response, open_responses.ResponseResource))
KINDS: dict[str, Kind] = {
    "POST /v1/chat/completions": Kind((ChatCompletion,), part=ChatCompletionChunk),
    "POST /v1/chat/completions/batch": Kind((ChatCompletion,)),
    "POST /v1/completions": Kind((of_openai.Completion,), part=of_openai.Completion),
    "POST /v1/responses": _RESPONSE,
    "POST /v1/responses/input_tokens": Kind((InputTokenCountResponse,)),
    "GET /v1/responses/{}": _RESPONSE,
    "POST /v1/responses/{}/cancel": _RESPONSE,
    "GET /v1/responses/{}/input_items": Kind((ResponseItemList,)),
    "POST /v1/embeddings": Kind((of_openai.CreateEmbeddingResponse,)),
    "POST /v1/audio/transcriptions": Kind((Transcript,), part=TranscriptEvent),
    "POST /v1/audio/translations": Kind((Translated,), part=TranscriptEvent),
    "GET /v1/models": Kind((ListOf,), each=of_openai.Model),
    "GET /v1/models/{}": Kind((of_openai.Model,)),
    "POST /v1/files": Kind((of_openai.FileObject,)),
    "GET /v1/files": Kind((ListOf,), each=of_openai.FileObject),
    "GET /v1/files/{}": Kind((of_openai.FileObject,)),
    "DELETE /v1/files/{}": Kind((of_openai.FileDeleted,)),
    "POST /v1/batches": Kind((of_openai.Batch,)),
    "GET /v1/batches": Kind((ListOf,), each=of_openai.Batch),
    "GET /v1/batches/{}": Kind((of_openai.Batch,)),
    "POST /v1/batches/{}/cancel": Kind((of_openai.Batch,)),
    "POST /v1/decisions": Kind((of_openai.Decision,)),
    "POST /v1/messages": Kind((anthropic.types.Message,)),
    "POST /v1/messages/count_tokens": Kind((anthropic.types.MessageTokensCount,)),
    "POST /api/chat": Kind((ollama.ChatResponse,), part=ollama.ChatResponse),
    "POST /api/generate": Kind((ollama.GenerateResponse,), part=ollama.GenerateResponse),
    "POST /api/embed": Kind((ollama.EmbedResponse,)),
    "POST /api/embeddings": Kind((ollama.EmbeddingsResponse,)),
    "POST /api/show": Kind((ollama.ShowResponse,)),
    "GET /api/tags": Kind((ollama.ListResponse,)),
    "GET /api/ps": Kind((ollama.ProcessResponse,)),
}
"""What is answered with 200; `{}` is an id. All other routes are ours or vLLM's, and no package has types for them."""

_WITH_RESPONSE = ("created", "queued", "in_progress", "completed", "failed", "incomplete")
_EVENT_LOGPROBS = (text_delta.Logprob, text_delta.LogprobTopLogprob, text_done.Logprob, text_done.LogprobTopLogprob)
OWN_FIELDS: dict[type[BaseModel], str] = {
    ChatCompletion: "metrics prompt_logprobs prompt_text prompt_token_ids",
    ChatCompletionChunk: "metrics prompt_logprobs prompt_text prompt_token_ids",
    ChatCompletionMessage: "reasoning reasoning_content",
    ChoiceDelta: "reasoning reasoning_content",
    WholeChoice: "stop_reason token_ids",
    ChunkChoice: "stop_reason token_ids",
    of_openai.Completion: "metrics",
    of_openai.CompletionChoice: "prompt_logprobs prompt_text prompt_token_ids stop_reason token_ids",
    of_openai.CreateEmbeddingResponse: "created id",
    EmbeddingUsage: "completion_tokens prompt_tokens_details",
    **dict.fromkeys((audio.TranscriptionVerbose, audio.TranslationVerbose), "task"),
    audio.Translation: "usage",
    of_openai.Model: "max_model_len parent pooling root vocab_size",
    anthropic.types.InvalidRequestErrorObject: "details",
    **dict.fromkeys(_EVENT_LOGPROBS, "bytes"),
    Response: "frequency_penalty presence_penalty store",
}
"""Fields that the packages do not know, by the type that has them: vLLM's, those of Open Responses, what Anthropic's
SDKs read of an error, and `task`, which OpenAI's API sends."""


def problems(answers: Sequence[Answer]) -> Iterator[str]:
    """What is wrong with answers, each in a line."""
    for answer in answers:
        try:
            _check(answer)
        except (ValidationError, AssertionError) as error:
            yield f"{answer.method} {answer.path} -> {answer.status}: {error}"


def _check(answer: Answer) -> None:
    kind = KINDS.get(route_of(answer))
    if kind is None or not answer.status:
        return
    if answer.content_type in (_EVENTS, _LINES):
        for part in _parts(answer):
            _check_part(answer.path, kind, part)
    elif answer.content_type == "application/json" and answer.ended and len(answer.body) <= MAX_BYTES:
        body = bytes(answer.body)
        if answer.status >= 400:
            _validated(_error_type(answer.path), body)
        elif answer.method != "HEAD":
            _check_whole(kind, body)


def _check_whole(kind: Kind, body: bytes) -> None:
    for each in kind.whole:
        value = _validated(each, body)
        if kind.each is not None:
            for item in value.data:
                _validated(kind.each, json.dumps(item))


def route_of(answer: Answer) -> str:
    """The route of KINDS that an answer is of; empty for another."""
    for pattern in (answer.path, *_patterns(answer.path)):
        if (route := f"{answer.method} {pattern}") in KINDS:
            return route
    return ""


def _patterns(path: str) -> Iterator[str]:
    if (found := re.fullmatch(r"(/v1/(?:responses|files|batches|models))/([^/]+)(/\w+)?", path)) is not None:
        yield f"{found[1]}/{{}}{found[3] or ''}"


def _error_type(path: str) -> type[BaseModel]:
    if path.startswith("/v1/messages"):
        return anthropic.types.ErrorResponse
    return OllamaError if path.startswith("/api/") else OpenAIError


def _parts(answer: Answer) -> list[tuple[str, str]]:
    """The name and data of each event of a stream that came whole, or each line."""
    text = bytes(answer.body).decode(errors="replace")
    if answer.content_type == _LINES:
        return [("", line) for line in text.split("\n")[:-1]]
    found = []
    for block in re.split(r"\n\n", text)[:-1]:
        lines = [line.partition(": ") for line in block.split("\n") if not line.startswith(":")]
        fields = {name: value for name, _, value in lines}
        assert fields.keys() <= {"event", "data"}, block
        if "data" in fields:
            found.append((fields.get("event", ""), fields["data"]))
    return found


def _check_part(path: str, kind: Kind, part: tuple[str, str]) -> None:
    name, data = part
    if data == "[DONE]":
        return
    event = json.loads(data)
    if path.startswith("/v1/responses"):
        assert name == event["type"]
        _validated(_openai_events()[name], data)
        if name in _open_responses_events() and event.get("item", {}).get("type") not in _CLIENT_CALLS:
            _validated(_open_responses_events()[name], data)
    elif path.startswith("/v1/messages"):
        assert name == event["type"]
        if name != "ping":
            _validated(anthropic.types.ErrorResponse if name == "error" else _anthropic_events()[name], data)
    elif "error" in event:
        _validated(_error_type(path), data)
    else:
        assert kind.part is not None, f"{path} streams, and nobody checks it"
        _validated(kind.part, json.dumps(_with_functions(event)))


def _with_functions(chunk: dict[str, Any]) -> dict[str, Any]:
    """A chunk whose calls of custom tools are calls of functions: `openai` has a type for the former in whole answers
    only."""
    for choice in chunk.get("choices", ()):
        for call in choice.get("delta", {}).get("tool_calls") or ():
            if "custom" in call:
                custom = call.pop("custom")
                assert custom.keys() <= {"name", "input"}
                assert call.pop("type", "custom") == "custom"
                call["function"] = {"arguments": custom.pop("input"), **custom}
    return chunk


@cache
def _events_of(union: Any) -> dict[str, type[BaseModel]]:
    """The types of a union, by the names of the events."""
    return {value: each for each in typing.get_args(union) for value in _values(each.model_fields["type"].annotation)}


def _values(annotation: Any) -> Sequence[str]:
    return typing.get_args(annotation) or [each.value for each in annotation]


def _openai_events() -> dict[str, type[BaseModel]]:
    return _events_of(typing.get_args(ResponseStreamEvent)[0])


def _anthropic_events() -> dict[str, type[BaseModel]]:
    return _events_of(typing.get_args(anthropic.types.RawMessageStreamEvent)[0])


@cache
def _open_responses_events() -> dict[str, type[BaseModel]]:
    events = [kind for name, kind in vars(open_responses).items() if name.endswith("StreamingEvent")]
    return {name: kind for kind in events for name in _values(kind.model_fields["type"].annotation)}


@cache
def _adapter(kind: type[BaseModel]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _validated(kind: type[BaseModel], data: bytes | str) -> Any:
    if kind in _EXCUSED:
        body = json.loads(data)
        _EXCUSED[kind](body)
        data = json.dumps(body)
    value = _adapter(kind).validate_json(data, strict=True)
    assert not (unknown := set(unknown_fields(value))), f"{kind.__name__} has unknown fields: {unknown}"
    return value


def _excuse_reasons(answer: Any) -> None:
    """vLLM's reasons for an end, and in streams of completions no reason before the last chunk, as OpenAI sends."""
    for choice in answer["choices"]:
        if choice["finish_reason"] in (None, "abort", "repetition"):
            choice["finish_reason"] = "stop"


def _excuse_completion(answer: Any) -> None:
    """Tokens of a prompt that have no log probability: the first, as OpenAI's, and those that were not computed."""
    _excuse_reasons(answer)
    for choice in answer["choices"]:
        for values in (choice.get("logprobs") or {}).values():
            values[:] = [value for value in values if value is not None]


def _excuse_base64(answer: Any) -> None:
    """Vectors in base64, of whatever element type."""
    for each in answer["data"]:
        if isinstance(each["embedding"], str):
            each["embedding"] = list(map(float, base64.b64decode(each["embedding"], validate=True)))


def _excuse_what_was_asked(answer: Any) -> None:
    """Schemas and tools other than functions among what is said back, and calls of these, as OpenAI does; Open
    Responses knows no such tools, and says that the schema is null."""
    response = answer.get("response", answer)
    if response.get("text", {}).get("format", {}).get("type") == "json_schema":
        response["text"]["format"]["schema"] = None
    if any(tool["type"] != "function" for tool in response.get("tools", ())):
        response["tools"] = [tool for tool in response["tools"] if tool["type"] == "function"]
        response["tool_choice"] = "auto"
        response["output"] = [item for item in response["output"] if item["type"] not in _CLIENT_CALLS]
    choice = response.get("tool_choice")
    if isinstance(choice, dict) and {each.get("type") for each in choice.get("tools", [choice])} != {"function"}:
        response["tool_choice"] = "auto"


_EXCUSED: dict[type[BaseModel], Callable[[Any], None]] = {
    ChatCompletion: _excuse_reasons,
    ChatCompletionChunk: _excuse_reasons,
    of_openai.Completion: _excuse_completion,
    of_openai.CreateEmbeddingResponse: _excuse_base64,
    **dict.fromkeys(
        (open_responses.ResponseResource, *(_open_responses_events()[f"response.{name}"] for name in _WITH_RESPONSE)),
        _excuse_what_was_asked,
    ),
}
"""What is sent though the types have no place for it, by type: taken out of a body before it is checked."""


def unknown_fields(value: Any) -> Iterator[str]:
    """Fields of a checked value that its package does not know, however deep, and that are not OWN_FIELDS."""
    if isinstance(value, BaseModel):
        kind = type(value)
        if value.model_extra:
            own = OWN_FIELDS.get(kind, "").split()
            yield from (f"{kind.__name__}.{name}" for name in value.model_extra if name not in own)
        for name in kind.model_fields:
            yield from unknown_fields(getattr(value, name))
    elif isinstance(value, list):
        for each in value:
            yield from unknown_fields(each)
