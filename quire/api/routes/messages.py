"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.api.anthropic_chat import chat_request, named_by_anthropic
from quire.api.anthropic_messages import AnthropicMessages
from quire.api.disconnect import cancel_on_disconnect
from quire.api.request_body import openapi_body, read_body
from quire.api.schemas.chat import ChatRequest
from quire.api.schemas.messages import MESSAGES_FIELDS, CountTokensRequest, MessagesRequest
from quire.api.serving import Serving, json_response
from quire.api.shared_turn import convert


def add_messages(app: FastAPI, serving: Serving) -> None:
    """Add the routes to the application."""

    @app.post("/v1/messages", openapi_extra=openapi_body(MessagesRequest), tags=["generate"])
    async def converse(request: Request) -> Response:
        """Answer a conversation."""
        serving.refuse_if_full(request)
        fields = await read_body(request, MessagesRequest, MESSAGES_FIELDS)
        return await cancel_on_disconnect(request, _answer(serving, request, fields))

    @app.post("/v1/messages/count_tokens", openapi_extra=openapi_body(CountTokensRequest), tags=["tokens"])
    async def count_tokens(request: Request) -> Response:
        """How many tokens a conversation has."""
        fields = await read_body(request, CountTokensRequest, MESSAGES_FIELDS)
        return await cancel_on_disconnect(request, _count(serving, fields))


async def _answer(serving: Serving, request: Request, body: MessagesRequest) -> Response:
    model = serving.model_name(body.model)
    fields = (await _chat(serving, body)).sent_by(request.state.caller)
    with named_by_anthropic():
        choices = await serving.chat.start(fields)
    request_id = request.state.request_id
    shows = body.thinking is None or (body.thinking.type != "disabled" and body.thinking.display != "omitted")
    messages = AnthropicMessages(f"msg_{request_id}", model, choices, show_thinking=shows)
    serving.log_request(request_id, request.scope["path"], choices.adds, stream=bool(body.stream))
    if body.stream:
        return serving.stream(messages, choices, request_id)
    try:
        (whole,) = await choices.collect()
    finally:
        choices.close()
    return json_response(messages.body(whole))


async def _count(serving: Serving, body: CountTokensRequest) -> Response:
    serving.model_name(body.model)
    with named_by_anthropic():
        prompt = await serving.chat.prepare(await _chat(serving, body))
    return json_response({"input_tokens": len(prompt.tokens)})


async def _chat(serving: Serving, body: CountTokensRequest) -> ChatRequest:
    template = serving.text.chat_template
    limits = serving.chat.parsers.limits_reasoning
    variables = template.variables if template else ()
    return await convert(len(body.messages), lambda: chat_request(body, variables, limits_reasoning=limits))
