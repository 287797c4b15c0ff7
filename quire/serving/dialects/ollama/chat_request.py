"""Ollama's requests as chats and completions.

Owns what each field means. Knows nothing about responses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

from quire.errors import RequestError
from quire.serving.api.request_body import check_fields
from quire.serving.api.schemas.chat import ChatRequest
from quire.serving.api.schemas.completion import CompletionRequest
from quire.serving.api.schemas.field_names import fields_named
from quire.serving.dialects.ollama.schemas import (
    OPTION_FIELDS,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    Options,
    Think,
)
from quire.text.hints import THINKING_SWITCHES

_NAMES = {
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "reasoning_effort": "think",
    "response_format": "format",
}
"""Fields of a chat or completion by their names in Ollama's body, where these differ."""


def model_name(asked: str, serves: Callable[[str], bool]) -> str:
    """The name that is meant: Ollama's clients add a tag, which a name may also have of itself."""
    return asked if serves(asked) else asked.removesuffix(":latest")


def chat_request(body: OllamaChatRequest | OllamaGenerateRequest, variables: Collection[str]) -> ChatRequest:
    """The chat that is meant.

    Args:
        variables: Of the model's chat template, which may have a switch for thinking.

    Raises:
        RequestError: A field is wrong, or asks for what is not served.
    """
    fields = _shared(body) | _thinking(body.think, variables)
    if isinstance(body, OllamaChatRequest):
        messages = body.messages or []
        fields["messages"] = _conversation(messages)
        if body.tools:
            fields["tools"] = body.tools
        if messages[-1].role == "assistant" and not messages[-1].tool_calls:
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        fields["messages"] = [*system, {"role": "user", "content": body.prompt or ""}]
    return check_fields(fields, ChatRequest)


def completion_request(body: OllamaGenerateRequest) -> CompletionRequest:
    """The completion that is meant by `raw` or `suffix`.

    Raises:
        RequestError: A field is wrong, or asks for what is not served.
    """
    if body.system:
        raise RequestError("system needs the chat template: leave out raw and suffix.", param="system")
    fields = _shared(body) | {"prompt": body.prompt or ""}
    if body.suffix:
        fields["suffix"] = body.suffix
    return check_fields(fields, CompletionRequest)


def named_by_ollama() -> AbstractContextManager[None]:
    """A RequestError about a field of a chat or completion names Ollama's."""
    return fields_named(_NAMES)


def _shared(body: OllamaChatRequest | OllamaGenerateRequest) -> dict[str, Any]:
    """Sampling parameters and the form of the answer."""
    options = check_fields(body.options or {}, Options, OPTION_FIELDS)
    limited = options.num_predict is not None and options.num_predict >= 0
    fields = {
        "max_tokens": options.num_predict if limited else None,
        "repetition_penalty": options.repeat_penalty,
        **options.model_dump(exclude={"num_predict", "repeat_penalty"}),
    }
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        schema = {"name": "format", "schema": body.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {name: value for name, value in fields.items() if value is not None}


def _thinking(think: Think | None, variables: Collection[str]) -> dict[str, Any]:
    if isinstance(think, str):
        return {"reasoning_effort": think}
    if think is None:
        return {}
    return {"chat_template_kwargs": {name: think for name in THINKING_SWITCHES if name in variables}}


def _conversation(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Calls have no ids in Ollama: results follow in the order of the calls."""
    plain: list[dict[str, Any]] = []
    unanswered: list[str] = []
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            turn["reasoning"] = message.thinking
        if message.tool_calls:
            calls = [
                {
                    "id": call.id or f"call_{len(plain)}_{i}",
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": json.dumps(call.function.arguments)},
                }
                for i, call in enumerate(message.tool_calls)
            ]
            turn["tool_calls"] = calls
            unanswered = [str(call["id"]) for call in calls]
        if message.role == "tool":
            if message.tool_name:
                turn["name"] = message.tool_name
            answered = unanswered.pop(0) if unanswered else ""
            turn["tool_call_id"] = message.tool_call_id or answered
        plain.append(turn)
    return plain
