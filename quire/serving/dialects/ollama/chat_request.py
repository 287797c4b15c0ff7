"""Ollama's requests as chats and completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from quire.errors import RequestError, UnsupportedField
from quire.serving.api.request_body import check_fields
from quire.serving.api.schemas.chat import ChatRequest
from quire.serving.api.schemas.completion import CompletionRequest
from quire.serving.api.schemas.known_fields import FieldNames, fields_named
from quire.serving.dialects.dialect import function_call, json_format, make_chat, thinking_switches
from quire.serving.dialects.ollama.schemas import (
    OPTION_FIELDS,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    Options,
)
from quire.text.hints import NOT_READ, HintLog

NAMES = FieldNames({
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "reasoning_effort": "think",
    "response_format": "format",
})  # fmt: skip
"""Fields of a chat or completion by their names in Ollama's body, where these differ."""


def model_name(asked: str, serves: Callable[[str], bool]) -> str:
    """The name that is meant: Ollama's clients add a tag, which a name may also have of itself."""
    return asked if serves(asked) else asked.removesuffix(":latest")


def chat_request(
    body: OllamaChatRequest | OllamaGenerateRequest, model: str, variables: Collection[str], *, sees: bool = False
) -> ChatRequest:
    """The chat that is meant, for a model that `sees` images or does not; raises a RequestError that names fields as
    Ollama does. `variables` are the template's."""
    fields = _shared(body, model)
    if isinstance(body.think, str):
        fields["reasoning_effort"] = body.think
    elif body.think is not None:
        fields["chat_template_kwargs"] = thinking_switches(body.think, variables)
    if isinstance(body, OllamaChatRequest):
        messages = body.messages or []
        fields |= {"messages": _conversation(messages, sees=sees), "tools": body.tools or None}
        if messages[-1].role == "assistant" and not messages[-1].tool_calls:
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        fields["messages"] = [
            *system,
            {"role": "user", "content": _content(body.prompt, body.images, "images", sees=sees)},
        ]
    return make_chat(fields, NAMES)


def completion_request(body: OllamaGenerateRequest, model: str) -> CompletionRequest:
    """The completion that is meant by `raw` or `suffix`; raises what `chat_request` does."""
    if body.images:
        raise RequestError("images need the chat template: leave out raw and suffix.", param="images")
    if body.system:
        raise RequestError("system needs the chat template: leave out raw and suffix.", param="system")
    fields = _shared(body, model) | {"prompt": body.prompt or "", "suffix": body.suffix or None}
    with fields_named(NAMES):
        return check_fields({name: value for name, value in fields.items() if value is not None}, CompletionRequest)


def log_hints(body: OllamaChatRequest | OllamaGenerateRequest, hints: HintLog, variables: Collection[str]) -> None:
    """Log the hints that a model whose chat template has these variables cannot follow."""
    if isinstance(body.think, bool) and not thinking_switches(True, variables):
        hints.drop("think", NOT_READ)


def _shared(body: OllamaChatRequest | OllamaGenerateRequest, model: str) -> dict[str, Any]:
    options = check_fields(body.options or {}, Options, OPTION_FIELDS)
    limited = options.num_predict is not None and options.num_predict >= 0
    fields = {
        "model": model,
        "max_tokens": options.num_predict if limited else None,
        "repetition_penalty": options.repeat_penalty,
        **options.model_dump(exclude={"num_predict", "repeat_penalty"}),
    }
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        fields["response_format"] = json_format("format", body.format)
    return fields


def _conversation(messages: Sequence[OllamaMessage], *, sees: bool) -> list[dict[str, Any]]:
    """The messages of the chat. Calls have no ids in Ollama: results follow in the order of the calls."""
    plain: list[dict[str, Any]] = []
    unanswered: list[str] = []
    for number, message in enumerate(messages):
        content = _content(message.content, message.images, f"messages[{number}].images", sees=sees)
        turn: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking:
            turn["reasoning"] = message.thinking
        if message.tool_calls:
            turn["tool_calls"] = [
                function_call(
                    call.id or f"call_{len(plain)}_{i}", call.function.name, json.dumps(call.function.arguments)
                )
                for i, call in enumerate(message.tool_calls)
            ]
            unanswered = [call["id"] for call in turn["tool_calls"]]
        if message.role == "tool":
            if message.tool_name:
                turn["name"] = message.tool_name
            answered = unanswered.pop(0) if unanswered else ""
            turn["tool_call_id"] = message.tool_call_id or answered
        plain.append(turn)
    return plain


def _content(text: str | None, images: Sequence[str] | None, place: str, *, sees: bool) -> str | list[dict[str, Any]]:
    """What a message says: its images first, as Ollama shows them."""
    if not images:
        return text or ""
    if not sees:
        raise UnsupportedField(place, "this model reads text only; leave it out")
    shown = [{"type": "image_url", "image_url": {"url": f"data:;base64,{image}"}} for image in images]
    return [*shown, {"type": "text", "text": text or ""}]
