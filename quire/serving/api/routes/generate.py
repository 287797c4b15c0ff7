"""POST /inference/v1/generate."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.serving.api.answer_size import check_answer_size
from quire.serving.api.disconnect import cancel_on_disconnect
from quire.serving.api.prompt_fields import PromptFields
from quire.serving.api.prompt_renderer import check_length
from quire.serving.api.request_body import openapi_body, read_body
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.request_ids import use_request_id
from quire.serving.api.schemas.generate import GenerateRequest
from quire.serving.api.serializers import GenerateSerializer
from quire.serving.api.serving import Serving


def add_generate(app: FastAPI, serving: Serving) -> None:
    """Token ids go on."""

    @app.post("/inference/v1/generate", openapi_extra=openapi_body(GenerateRequest), tags=["generate"])
    async def generate(request: Request) -> Response:
        """Go on with token ids; the answer has token ids, no text."""
        serving.refuse_if_full()
        fields = await read_body(request, GenerateRequest)
        return await cancel_on_disconnect(request, answer_generate(serving, request, fields))


async def answer_generate(serving: Serving, request: Request, fields: GenerateRequest) -> Response:
    """The response to token ids."""
    use_request_id(request, fields.request_id)
    fields.sent_by(request.state.caller)
    serving.model_name(fields.model)
    fields.check_stream_options()
    with fields.named_as_sent():
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
    choices = RequestChoices(serving.session, collector, tokenizer)
    prompt = PromptFields(choices.prompts, params.n, tokenizer, show_logprobs=params.prompt_logprobs is not None)
    return await serving.respond(request, fields, choices, GenerateSerializer(params.num_reported, prompt))
