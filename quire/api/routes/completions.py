"""POST /v1/completions."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.api.body import openapi_body, read_body
from quire.api.delivery import unless_gone
from quire.api.schemas.completion import CompletionRequest
from quire.api.serving import Serving
from quire.api.session import MAX_SEQUENCES
from quire.api.shapes import CompletionShape
from quire.errors import RequestError

DEFAULT_MAX_TOKENS = 16


def add_completions(app: FastAPI, serving: Serving) -> None:
    """Text goes on."""

    @app.post("/v1/completions", openapi_extra=openapi_body(CompletionRequest), tags=["generate"])
    async def complete(request: Request) -> Response:
        """Go on with one or several prompts."""
        fields = await read_body(request, CompletionRequest)
        return await unless_gone(request, _answer(serving, request, fields))


async def _answer(serving: Serving, request: Request, fields: CompletionRequest) -> Response:
    serving.model_name(fields.model)
    fields.check_stream_options()
    longest = serving.session.submission.longest
    params = fields.sampling(
        serving.text.defaults,
        text=serving.text.tokenizer is not None,
        max_tokens=DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens,
        logprobs=fields.logprobs,
    )
    prompts = fields.prompts()
    if len(prompts) * params.n > MAX_SEQUENCES:
        raise RequestError(f"A request may ask for at most {MAX_SEQUENCES} sequences (prompts × n).", param="prompt")
    special = fields.add_special_tokens is not False
    tokens = [
        await serving.prompts.encode(prompt, special, longest) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]
    stream = serving.session.open(tokens, params)
    shape = CompletionShape(serving.text.tokenizer, params.logprobs is not None)
    return await serving.respond(request, fields, stream, shape, "cmpl")
