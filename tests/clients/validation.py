"""Whether responses are what the types of the official packages say, and keep the rules that types cannot say."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import anthropic.types
import ollama
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.clients.recorder import Exchange

_WHOLE: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/responses": Response,
    "/v1/messages": anthropic.types.Message,
    "/v1/messages/count_tokens": anthropic.types.MessageTokensCount,
    "/api/chat": ollama.ChatResponse,
    "/api/generate": ollama.GenerateResponse,
    "/api/tags": ollama.ListResponse,
    "/api/show": ollama.ShowResponse,
    "/api/ps": ollama.ProcessResponse,
}
_RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)


def check(exchanges: Sequence[Exchange]) -> None:
    """Fail where a response is not what its path promises. Every exchange must be understood."""
    assert exchanges
    for exchange in exchanges:
        assert exchange.status == 200, (exchange.path, exchange.sent, bytes(exchange.received))
        if exchange.streamed:
            _check_stream(exchange)
        elif exchange.path == "/v1/models":
            for card in exchange.body["data"]:
                Model.model_validate(card, strict=True)
        else:
            _WHOLE[exchange.path].model_validate_json(bytes(exchange.received), strict=True)


def _check_stream(exchange: Exchange) -> None:
    match exchange.path:
        case "/v1/chat/completions" | "/v1/completions":
            _check_chunks(exchange)
        case "/v1/messages":
            _check_message_events(exchange)
        case "/v1/responses":
            for name, data in exchange.events:
                event = json.loads(data)
                assert name == event["type"]
                _RESPONSE_EVENT.validate_python(event, strict=True)
        case "/api/chat" | "/api/generate":
            lines = exchange.received.decode().splitlines()
            for line in lines:
                _WHOLE[exchange.path].model_validate_json(line, strict=True)
            assert [json.loads(line)["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        case path:
            raise AssertionError(f"{path} streams, and nobody checks it")


def _check_chunks(exchange: Exchange) -> None:
    """Also: one role, one finish for each choice, the finish apart from content, usage only when asked for, and
    [DONE] once, at the end."""
    *events, done = [data for _, data in exchange.events]
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    schema = ChatCompletionChunk if exchange.path.startswith("/v1/chat") else Completion
    roles: Counter[int] = Counter()
    finishes: Counter[int] = Counter()
    for chunk in chunks:
        schema.model_validate(chunk if schema is ChatCompletionChunk else _as_if_finished(chunk), strict=True)
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            said = choice.get("text") or delta.get("content") or delta.get("tool_calls") or delta.get("reasoning")
            roles[choice["index"]] += "role" in delta
            finishes[choice["index"]] += choice["finish_reason"] is not None
            assert not (said and choice["finish_reason"])
    indexes = range(exchange.sent.get("n") or 1)
    assert [finishes[i] for i in indexes] == [1] * len(indexes)
    if schema is ChatCompletionChunk:
        assert [roles[i] for i in indexes] == [1] * len(indexes)
    wanted = bool((exchange.sent.get("stream_options") or {}).get("include_usage"))
    assert [bool(chunk.get("usage")) for chunk in chunks] == [False] * (len(chunks) - wanted) + [True] * wanted


def _as_if_finished(chunk: dict[str, Any]) -> dict[str, Any]:
    """The type of completions is for whole ones only: OpenAI's own streams have no reason before the last chunk."""
    choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
    return {**chunk, "choices": choices}


def _check_message_events(exchange: Exchange) -> None:
    names = []
    for name, data in exchange.events:
        event = json.loads(data)
        assert name == event["type"]
        if name != "ping":
            _MESSAGE_EVENT.validate_python(event, strict=True)
        names.append(name)
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert names.count("content_block_start") == names.count("content_block_stop")
