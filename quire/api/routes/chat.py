"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.api.disconnect import cancel_on_disconnect
from quire.api.request_body import openapi_body, read_body
from quire.api.request_ids import use_request_id
from quire.api.schemas.chat import ChatRequest
from quire.api.serializers import ChatSerializer
from quire.api.serving import Serving
from quire.sampling import SamplingParams


def add_chat(app: FastAPI, serving: Serving) -> None:
    """Conversations."""

    @app.post("/v1/chat/completions", openapi_extra=openapi_body(ChatRequest), tags=["generate"])
    async def converse(request: Request) -> Response:
        """Answer a conversation."""
        fields = await read_body(request, ChatRequest)
        return await cancel_on_disconnect(request, _answer(serving, request, fields))


async def _answer(serving: Serving, request: Request, fields: ChatRequest) -> Response:
    use_request_id(request, fields.request_id)
    serving.model_name(fields.model)
    fields.check_stream_options()
    longest = serving.session.submission.longest
    with fields.named_as_sent():
        params, options = _sampling(serving, fields), fields.options(serving.text.tokenizer)
    text = await serving.renderer.render(
        fields.messages,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        variables=fields.chat_template_kwargs,
    )
    limit = longest if params.truncate_prompt_tokens is None else None
    tokens = await serving.renderer.encode(text, bool(fields.add_special_tokens), limit)
    if fields.longest is None:
        params = serving.text.defaults.limit_chat(params, longest - len(tokens))
    with fields.named_as_sent():
        if fields.use_beam_search:
            return await serving.respond_with_beams(
                request,
                fields,
                [tokens],
                params,
                options,
                lambda prompts: _serializer(serving, fields, params, prompts),
            )
        collector = serving.session.add_request([tokens], params, **options)
    serializer = _serializer(serving, fields, params, collector.prompts)
    return await serving.respond(request, fields, collector, serializer)


def _serializer(
    serving: Serving, fields: ChatRequest, params: SamplingParams, prompts: Sequence[Sequence[int]]
) -> ChatSerializer:
    tokenizer, role = serving.text.tokenizer, serving.config.server.response_role
    return ChatSerializer(
        fields.token_names(tokenizer),
        params.num_reported,
        role,
        fields.prompt_fields(prompts, tokenizer),
        echo=fields.echoed(role),
        token_ids=bool(fields.return_token_ids),
    )


def _sampling(serving: Serving, fields: ChatRequest) -> SamplingParams:
    return fields.sampling(
        serving.text.defaults,
        text=serving.text.tokenizer is not None,
        max_tokens=fields.longest,
        logprobs=fields.num_logprobs,
    )
