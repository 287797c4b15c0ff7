"""POST /v1/chat/completions/render and /v1/completions/render: what the engine would be asked, without asking it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.sampling_params import SamplingParams
from quire.serving.api.disconnect import cancel_on_disconnect
from quire.serving.api.request_body import openapi_body, read_body
from quire.serving.api.request_head import use_request_id
from quire.serving.api.routes.completions import prepare_completion
from quire.serving.api.schemas.chat import ChatRequest
from quire.serving.api.schemas.completion import CompletionRequest
from quire.serving.api.schemas.known_fields import fields_named
from quire.serving.api.schemas.sampling import SamplingFields
from quire.serving.api.serving import Serving, json_response
from quire.structured_outputs_params import StructuredOutputsParams


def add_render(app: FastAPI, serving: Serving) -> None:
    """Add the routes to the application."""

    @app.post("/v1/chat/completions/render", openapi_extra=openapi_body(ChatRequest), tags=["tokens"])
    async def render_chat(request: Request) -> Response:
        """A conversation as a body for /inference/v1/generate."""
        fields = await read_body(request, ChatRequest)
        return await cancel_on_disconnect(request, _chat(serving, request, fields))

    @app.post("/v1/completions/render", openapi_extra=openapi_body(CompletionRequest), tags=["tokens"])
    async def render_completion(request: Request) -> Response:
        """Each prompt as a body for /inference/v1/generate, in a list."""
        fields = await read_body(request, CompletionRequest)
        return await cancel_on_disconnect(request, _completion(serving, request, fields))


async def _chat(serving: Serving, request: Request, fields: ChatRequest) -> Response:
    _check(serving, request, fields)
    prompt = await serving.chat.prepare(fields)
    if prompt.form_begins_late:
        form = prompt.params.structured_outputs
        assert form is not None
        raise form.error("it begins behind the model's reasoning, which cannot be rendered: switch reasoning off.")
    with fields_named(fields.field_names):
        (body,) = _bodies(serving, request, fields, [prompt.tokens], prompt.params, prompt.options)
    return json_response(body)


async def _completion(serving: Serving, request: Request, fields: CompletionRequest) -> Response:
    _check(serving, request, fields)
    prompts, params, options = await prepare_completion(serving, fields)
    return json_response(_bodies(serving, request, fields, prompts, params, options))


def _check(serving: Serving, request: Request, fields: SamplingFields) -> None:
    use_request_id(request, fields.request_id)
    serving.model_name(fields.model)
    fields.check_stream_options()
    if fields.use_beam_search:
        raise RequestError("use_beam_search cannot be rendered: it is many requests.", param="use_beam_search")


def _bodies(
    serving: Serving,
    request: Request,
    fields: SamplingFields,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    """One for each prompt, cut and checked as if it were to run."""
    checked = {name: value for name, value in options.items() if name not in ("collectors", "model")}  # nothing runs
    adds = [serving.session.submission.adds(prompt, params, **checked)[0] for prompt in prompts]
    return [
        {
            "request_id": request.state.request_id,
            "model": serving.model_name(fields.model),
            "token_ids": add.tokens,
            "sampling_params": _asked(add.sampling, params.structured_outputs),
            "stream": bool(fields.stream),
            "cache_salt": fields.cache_salt,
            "priority": fields.priority or 0,
        }
        for add in adds
    ]


def _asked(params: SamplingParams, form: StructuredOutputsParams | None) -> dict[str, Any]:
    """The parameters that differ from their defaults, and the length, which has another one there. The prompt is cut
    already; the form travels to the engine as a grammar, and here as it was asked for."""
    if form is not None:
        form = msgspec.structs.replace(form, name="structured_outputs")
    params = msgspec.structs.replace(params, truncate_prompt_tokens=None, structured_outputs=form)
    values: dict[str, Any] = msgspec.to_builtins(params, str_keys=True)
    return {"max_tokens": params.max_tokens, **values}
