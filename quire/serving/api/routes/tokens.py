"""POST /tokenize and /detokenize; POST /v1/chat/completions/render and /v1/completions/render."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.sampling_params import SamplingParams
from quire.serving.api.request_body import openapi_body, read_body
from quire.serving.api.request_work import cancel_on_disconnect
from quire.serving.api.routes.completions import prepare_completion
from quire.serving.api.schemas.chat import MAX_MESSAGES, ChatMessage, ChatRequest
from quire.serving.api.schemas.completion import CompletionRequest
from quire.serving.api.schemas.known_fields import Body, fields_named, optional
from quire.serving.api.schemas.sampling import SamplingFields
from quire.serving.api.schemas.tools import ChatTool
from quire.serving.api.serving import Serving, json_response
from quire.structured_outputs_params import StructuredOutputsParams

MAX_TOKENS = 2**18
"""Maximum number of tokens to be made a text: meanwhile no other Python code of the process runs."""


class TokenizeRequest(Body):
    """A text, or a conversation that the chat template turns into one."""

    model: str | None = None
    prompt: str | None = optional("Either this or messages.")
    messages: list[ChatMessage] | None = Field(default=None, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = optional("Default true for a prompt, false for messages.")
    add_generation_prompt: bool | None = optional("Default true.")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ChatTool] | None = optional("As in /v1/chat/completions.")
    mm_processor_kwargs: dict[str, Any] | None = optional("As in /v1/chat/completions.")
    media_io_kwargs: dict[str, Any] | None = optional("As in /v1/chat/completions.")
    return_token_strs: bool | None = optional("Also return the tokens as the vocabulary writes them.")


class DetokenizeRequest(Body):
    """Token ids."""

    model: str | None = None
    tokens: list[int] = Field(max_length=MAX_TOKENS)


def add_tokenize(app: FastAPI, serving: Serving) -> None:
    if serving.config.server.enable_tokenizer_info_endpoint:

        @app.get("/tokenizer_info", tags=["tokens"])
        async def tokenizer_info() -> Response:
            """The tokenizer's settings, with the chat template that is used."""
            template = serving.text.chat_template
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", **serving.text.tokenizer_settings}
            return json_response(settings | {"chat_template": template.source if template else None})

    @app.post("/tokenize", openapi_extra=openapi_body(TokenizeRequest), tags=["tokens"])
    async def to_tokens(request: Request) -> Response:
        """The token ids of a text or a conversation."""
        fields = await read_body(request, TokenizeRequest)
        serving.model_name(fields.model)
        longest = serving.session.input_processor.longest
        tokens = await _tokens(serving, request, fields, longest)
        body: dict[str, Any] = {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": None}
        if fields.return_token_strs:
            body["token_strs"] = [serving.renderer.tokenizer.token(token) for token in tokens]
        return json_response(body)

    @app.post("/detokenize", openapi_extra=openapi_body(DetokenizeRequest), tags=["tokens"])
    async def to_text(request: Request) -> Response:
        """The text of token ids."""
        fields = await read_body(request, DetokenizeRequest)
        serving.model_name(fields.model)
        tokenizer, ready = serving.renderer.tokenizer, serving.session.ready
        size = max(tokenizer.max_id + 1, ready.vocab_size if ready else 0)  # an embedding may be padded
        if fields.tokens and not 0 <= min(fields.tokens) <= max(fields.tokens) < size:
            wrong = next(token for token in fields.tokens if not 0 <= token < size)
            raise RequestError(f"Token id {wrong} is outside the vocabulary of {size} tokens.", param="tokens")
        return json_response({"prompt": await serving.renderer.decode(fields.tokens)})


async def _tokens(serving: Serving, request: Request, fields: TokenizeRequest, longest: int) -> list[int]:
    if (fields.prompt is None) == (fields.messages is None):
        raise RequestError("Send either prompt or messages.", param="prompt")
    if fields.messages is None:
        special = True if fields.add_special_tokens is None else fields.add_special_tokens
        return await serving.renderer.encode(fields.prompt or "", special, longest)
    conversation = ChatRequest(
        messages=fields.messages,
        add_special_tokens=bool(fields.add_special_tokens),
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        chat_template_kwargs=fields.chat_template_kwargs,
        tools=fields.tools,
        mm_processor_kwargs=fields.mm_processor_kwargs,
        media_io_kwargs=fields.media_io_kwargs,
    )
    _, tokens, _ = await serving.chat.rendered(conversation.sent_by(request.state.caller), longest)
    return tokens


def add_render(app: FastAPI, serving: Serving) -> None:
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
    if "media" in prompt.options:
        raise RequestError("A conversation with images cannot be rendered: send it as it is.", param="messages")
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
    serving.accept(request, fields)
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
    """The body of each prompt, cut and checked as if it were to run."""
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
        for add in serving.session.checked_adds(prompts, params, options)
    ]


def _asked(params: SamplingParams, form: StructuredOutputsParams | None) -> dict[str, Any]:
    """The parameters that differ from their defaults, and the length. The prompt is cut already."""
    if form is not None:
        form = msgspec.structs.replace(form, name="structured_outputs")
    params = msgspec.structs.replace(params, truncate_prompt_tokens=None, structured_outputs=form)
    values: dict[str, Any] = msgspec.to_builtins(params, str_keys=True)
    return {"max_tokens": params.max_tokens, **values}
