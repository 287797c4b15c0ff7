"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.serving.api.request_body import openapi_body, read_body
from quire.serving.api.request_work import cancel_on_disconnect, convert
from quire.serving.api.schemas.chat import ChatRequest
from quire.serving.api.serving import Serving, json_response
from quire.serving.dialects.anthropic.answers import AnthropicAnswers
from quire.serving.dialects.anthropic.chat_request import chat_request, hosted_tools, log_hints
from quire.serving.dialects.anthropic.schemas import MESSAGES_FIELDS, CountTokensRequest, MessagesRequest
from quire.serving.dialects.dialect import name_dropped, template_variables


def add_anthropic(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/messages", openapi_extra=openapi_body(MessagesRequest), tags=["generate"])
    async def converse(request: Request) -> Response:
        """Answer a conversation."""
        return await serving.read_and_answer(request, MessagesRequest, _answer, MESSAGES_FIELDS)

    @app.post("/v1/messages/count_tokens", openapi_extra=openapi_body(CountTokensRequest), tags=["tokens"])
    async def count_tokens(request: Request) -> Response:
        """How many tokens a conversation has."""
        fields = await read_body(request, CountTokensRequest, MESSAGES_FIELDS)
        return await cancel_on_disconnect(request, _count(serving, fields))


async def _answer(serving: Serving, request: Request, body: MessagesRequest) -> Response:
    model = serving.model_name(body.model)
    _, choices = await serving.chat.start((await _chat(serving, body)).sent_by(request.state.caller))
    shows = body.thinking is None or (body.thinking.type != "disabled" and body.thinking.display != "omitted")
    answers = AnthropicAnswers(request.state.request_id, model, choices, show_thinking=shows)
    response = await serving.answer(request, answers, choices, bool(body.stream))
    return name_dropped(response, hosted_tools(body), serving.text.hints)


async def _count(serving: Serving, body: CountTokensRequest) -> Response:
    serving.model_name(body.model)
    prompt = await serving.chat.prepare(await _chat(serving, body))
    return name_dropped(json_response({"input_tokens": len(prompt.tokens)}), hosted_tools(body), serving.text.hints)


async def _chat(serving: Serving, body: CountTokensRequest) -> ChatRequest:
    variables = template_variables(serving)
    log_hints(body, serving.text.hints, variables)
    return await convert(len(body.messages), lambda: chat_request(body, variables, sees=serving.chat.sees))
