"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.serving.api.chat_serializer import ChatSerializer
from quire.serving.api.chat_service import ChatPrompt
from quire.serving.api.disconnect import cancel_on_disconnect
from quire.serving.api.request_body import openapi_body, read_body
from quire.serving.api.request_ids import use_request_id
from quire.serving.api.schemas.chat import ChatRequest
from quire.serving.api.schemas.tools import ChosenTool
from quire.serving.api.serving import Serving


def add_chat(app: FastAPI, serving: Serving) -> None:
    """Conversations."""

    @app.post("/v1/chat/completions", openapi_extra=openapi_body(ChatRequest), tags=["generate"])
    async def converse(request: Request) -> Response:
        """Answer a conversation."""
        serving.refuse_if_full()
        fields = await read_body(request, ChatRequest)
        return await cancel_on_disconnect(request, answer_chat(serving, request, fields))


async def answer_chat(serving: Serving, request: Request, fields: ChatRequest) -> Response:
    """The response to a conversation."""
    use_request_id(request, fields.request_id)
    fields.sent_by(request.state.caller)
    serving.model_name(fields.model)
    fields.check_stream_options()
    serving.chat.check_room(fields)
    prompt = await serving.chat.prepare(fields)
    if fields.use_beam_search:
        with fields.named_as_sent():
            return await serving.respond_with_beams(
                request,
                fields,
                [prompt.tokens],
                prompt.params,
                prompt.options,
                lambda prompts: chat_serializer(serving, fields, prompt, prompts),
            )
    choices = await serving.chat.run(fields, prompt)
    return await serving.respond(request, fields, choices, chat_serializer(serving, fields, prompt, choices.prompts))


def chat_serializer(
    serving: Serving, fields: ChatRequest, prompt: ChatPrompt, prompts: Sequence[Sequence[int]]
) -> ChatSerializer:
    """Writes the answers to a conversation, whose prompts are as the engine got them."""
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
