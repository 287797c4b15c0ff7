"""POST /v1/chat/completions, and /v1/chat/completions/batch for several conversations in one request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.serving.api.auth import use_request_id
from quire.serving.api.beam_search_request import answer_with_beams
from quire.serving.api.chat_serializer import ChatSerializer
from quire.serving.api.chat_service import ChatPrompt
from quire.serving.api.request_body import openapi_body
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.request_work import TimeSlice
from quire.serving.api.schemas.chat import ChatBatchRequest, ChatRequest
from quire.serving.api.schemas.known_fields import fields_named
from quire.serving.api.schemas.tools import ChosenTool
from quire.serving.api.serving import Serving, json_response
from quire.serving.api.session.session import check_num_sequences

_COUNTS = ("prompt_tokens", "total_tokens", "completion_tokens")


def add_chat(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/chat/completions", openapi_extra=openapi_body(ChatRequest), tags=["generate"])
    async def converse(request: Request) -> Response:
        """Answer a conversation."""
        return await serving.read_and_answer(request, ChatRequest, answer_chat)

    @app.post(
        "/v1/chat/completions/batch", name="converse", openapi_extra=openapi_body(ChatBatchRequest), tags=["generate"]
    )
    async def converse_several(request: Request) -> Response:
        """Answer several conversations."""
        return await serving.read_and_answer(request, ChatBatchRequest, _answer_several)


async def answer_chat(serving: Serving, request: Request, fields: ChatRequest) -> Response:
    """The response to a conversation."""
    serving.accept(request, fields)
    serving.chat.check_room(fields)
    prompt = await serving.chat.prepare(fields)
    if fields.use_beam_search:
        with fields_named(fields.field_names):
            return await answer_with_beams(
                serving,
                request,
                fields,
                [prompt.tokens],
                prompt.params,
                prompt.options,
                lambda prompts: _serializer(serving, fields, prompt, prompts),
            )
    choices = await serving.chat.run(fields, prompt)
    return await serving.respond(request, fields, choices, _serializer(serving, fields, prompt, choices.prompts))


def _serializer(
    serving: Serving, fields: ChatRequest, prompt: ChatPrompt, prompts: Sequence[Sequence[int]]
) -> ChatSerializer:
    tokenizer, role = serving.text.tokenizer, serving.config.server.response_role
    return ChatSerializer(
        fields.token_names(tokenizer),
        prompt.params.num_reported,
        role,
        fields.prompt_fields(prompts, tokenizer),
        echo=fields.echoed(role),
        token_ids=bool(fields.return_token_ids),
        reasoning=fields.include_reasoning is not False,
        may_call=prompt.may_call,
        named_call=isinstance(fields.tool_choice, ChosenTool),
    )


async def _answer_several(serving: Serving, request: Request, fields: ChatBatchRequest) -> Response:
    use_request_id(request, fields.request_id)
    fields.sent_by(request.state.caller)
    model = serving.model_name(fields.model)
    conversations = fields.conversations()
    check_num_sequences(len(conversations), 1, param="messages")
    if conversations:
        serving.chat.check_room(conversations[0], len(conversations))
    time_slice, prompts, started = TimeSlice(), list[ChatPrompt](), list[RequestChoices]()
    for conversation in conversations:
        prompts.append(await serving.chat.prepare(conversation))
        await time_slice.offer()
    try:
        for conversation, prompt in zip(conversations, prompts, strict=True):
            started.append(await serving.chat.run(conversation, prompt, started[0] if started else None))
            await time_slice.offer()
        outputs = await asyncio.gather(*(choices.collect() for choices in started))
    finally:
        for choices in started:
            choices.close()
    serializers = [
        _serializer(serving, conversation, prompt, choices.prompts)
        for conversation, prompt, choices in zip(conversations, prompts, started, strict=True)
    ]
    shown = []
    for index, (serializer, output) in enumerate(zip(serializers, outputs, strict=True)):
        shown.append((await serializer.body(output))["choices"][0] | {"index": index})
        await time_slice.offer()
    head = serializers[0].head(request.state.request_id, int(time.time()), model, stream=False)
    return json_response({**head, "choices": shown, "usage": _usage(started)})


def _usage(started: list[RequestChoices]) -> dict[str, Any]:
    each = [choices.usage() for choices in started]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in each)
    reasoning = sum(usage["completion_tokens_details"]["reasoning_tokens"] for usage in each)
    counts = {name: sum(usage[name] for usage in each) for name in _COUNTS}
    return {
        **counts,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
