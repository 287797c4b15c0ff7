"""POST /inference/v1/generate, and POST /invocations: SageMaker's only route for work, the body says which is meant."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.serving.api.json_pieces import check_answer_size
from quire.serving.api.prompt_renderer import check_length
from quire.serving.api.request_body import check_object, openapi_body, read_body, read_object
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.request_work import cancel_on_disconnect
from quire.serving.api.routes.chat import answer_chat
from quire.serving.api.routes.completions import answer_completion
from quire.serving.api.schemas.chat import ChatRequest
from quire.serving.api.schemas.completion import CompletionRequest, GenerateRequest
from quire.serving.api.schemas.known_fields import fields_named
from quire.serving.api.serializers import GenerateSerializer
from quire.serving.api.serving import Serving
from quire.serving.api.token_fields import PromptFields

_BODIES: tuple[type[BaseModel], ...] = (ChatRequest, CompletionRequest, GenerateRequest)
"""Bodies that /invocations takes."""


def add_generate(app: FastAPI, serving: Serving) -> None:
    """Add the routes to the application."""

    @app.post("/inference/v1/generate", openapi_extra=openapi_body(GenerateRequest), tags=["generate"])
    async def generate(request: Request) -> Response:
        """Go on with token ids; the answer has token ids, no text."""
        serving.refuse_if_full()
        fields = await read_body(request, GenerateRequest)
        return await cancel_on_disconnect(request, _generate(serving, request, fields))

    @app.post("/invocations", openapi_extra=openapi_body(*_BODIES), tags=["generate"])
    async def invoke(request: Request) -> Response:
        """A conversation, a completion or token ids: as /v1/chat/completions, /v1/completions or
        /inference/v1/generate."""
        serving.refuse_if_full()
        body = await read_object(request)
        return await cancel_on_disconnect(request, _invoke(serving, request, body))


async def _generate(serving: Serving, request: Request, fields: GenerateRequest) -> Response:
    serving.accept(request, fields)
    with fields_named(fields.field_names):
        params, longest = fields.sampling(), serving.session.submission.longest
        if params.truncate_prompt_tokens is None:
            check_length(len(fields.token_ids), longest)
        serving.session.check_room(params.n, params.n + min(longest, len(fields.token_ids)))
        if params.prompt_logprobs is not None and fields.stream:
            raise RequestError("prompt_logprobs cannot be streamed: leave stream out.", param="prompt_logprobs")
        check_answer_size(
            [len(fields.token_ids)],
            params,
            num_choices=params.n,
            longest=longest,
            prompts_shown=params.prompt_logprobs is not None,
            held=not fields.stream,
        )
        bad_words = await serving.renderer.bad_words(params.bad_words)
        collector = await serving.session.add_request(
            [fields.token_ids],
            params,
            **fields.queue_options(),
            **await serving.session.grammar_options(params),
            bad_words=bad_words,
            thinking=serving.chat.parsers.budget(params, hints=serving.chat.hints),
        )
    tokenizer = serving.text.tokenizer
    choices = RequestChoices(serving.session, collector, tokenizer, names=fields.field_names)
    prompt = PromptFields(choices.prompts, params.n, tokenizer, show_logprobs=params.prompt_logprobs is not None)
    return await serving.respond(request, fields, choices, GenerateSerializer(params.num_reported, prompt))


async def _invoke(serving: Serving, request: Request, body: dict[str, Any]) -> Response:
    if "messages" in body:
        return await answer_chat(serving, request, await check_object(request, body, ChatRequest))
    if "prompt" in body:
        return await answer_completion(serving, request, await check_object(request, body, CompletionRequest))
    if "token_ids" in body:
        return await _generate(serving, request, await check_object(request, body, GenerateRequest))
    raise RequestError("Send messages, prompt or token_ids: they say which endpoint is meant.", param="messages")
