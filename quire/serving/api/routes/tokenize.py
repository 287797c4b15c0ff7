"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.serving.api.prompt_renderer import Conversation
from quire.serving.api.request_body import openapi_body, read_body
from quire.serving.api.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from quire.serving.api.schemas.tools import shown_tools
from quire.serving.api.serving import Serving, json_response


def add_tokenize(app: FastAPI, serving: Serving) -> None:
    """Between text and token ids."""

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
        longest = serving.session.submission.longest
        text = await _text(serving, fields)
        default = fields.messages is None
        special = default if fields.add_special_tokens is None else fields.add_special_tokens
        tokens = await serving.renderer.encode(text, special, longest)
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


async def _text(serving: Serving, fields: TokenizeRequest) -> str:
    if (fields.prompt is None) == (fields.messages is None):
        raise RequestError("Send either prompt or messages.", param="prompt")
    if fields.messages is None:
        return fields.prompt or ""
    conversation = Conversation(
        fields.messages,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        variables=fields.chat_template_kwargs or {},
        tools=shown_tools(fields.tools or ()),
    )
    return await serving.renderer.render(conversation)
