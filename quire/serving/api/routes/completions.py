"""POST /v1/completions and /inference/v1/generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.sampling_params import SamplingParams
from quire.serving.api.answers import CompletionSerializer, GenerateSerializer
from quire.serving.api.beam_search_request import answer_with_beams
from quire.serving.api.json_pieces import check_answer_size
from quire.serving.api.prompt_renderer import check_length
from quire.serving.api.request_body import openapi_body
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.request_work import TimeSlice
from quire.serving.api.schemas.completion import CompletionRequest, GenerateRequest, Prompt
from quire.serving.api.schemas.known_fields import fields_named
from quire.serving.api.serving import Serving
from quire.serving.api.session.session import check_num_sequences
from quire.serving.api.token_fields import PromptFields
from quire.text.fill_in_middle import FillInMiddle

DEFAULT_MAX_TOKENS = 16


def add_completions(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/completions", openapi_extra=openapi_body(CompletionRequest), tags=["generate"])
    async def complete(request: Request) -> Response:
        """Go on with one or several prompts."""
        return await serving.read_and_answer(request, CompletionRequest, answer_completion)


async def answer_completion(serving: Serving, request: Request, fields: CompletionRequest) -> Response:
    serving.accept(request, fields)
    _check_room(serving, fields)
    tokens, params, options = await prepare_completion(serving, fields)
    check_answer_size(
        [len(prompt) for prompt in tokens],
        params,
        num_choices=fields.num_sequences,
        longest=serving.session.input_processor.longest,
        prompts_shown=fields.num_sequences * (bool(fields.echo) or fields.prompt_fields(tokens, None).shown),
        held=fields.held,
    )
    if fields.use_beam_search:
        return await answer_with_beams(
            serving,
            request,
            fields,
            tokens,
            params,
            options,
            lambda prompts: _serializer(serving, fields, params, prompts),
        )
    collector = await serving.session.add_request(tokens, params, **options)
    choices = RequestChoices(serving.session, collector, serving.text.tokenizer, show_output=not fields.only_echo)
    return await serving.respond(request, fields, choices, _serializer(serving, fields, params, choices.prompts))


async def prepare_completion(
    serving: Serving, fields: CompletionRequest
) -> tuple[list[list[int]], SamplingParams, dict[str, Any]]:
    """Token ids of each prompt, sampling parameters, and options of `add_request`. Raises a RequestError that
    names a wrong field, or UnavailableError if no work is taken now."""
    longest = serving.session.input_processor.longest
    params = _sampling(serving, fields)
    options = fields.options() | await serving.chat.output_options(params)
    prompts = fields.prompts
    check_num_sequences(len(prompts), params.n, param="prompt")
    kept = fields.kept_tokens(longest)
    time_slice, tokens = TimeSlice(), list[list[int]]()
    if fields.suffix:
        marks = _marks(serving)
        stops = (*(params.stop_token_ids or ()), *marks.end)
        params = msgspec.structs.replace(params, stop_token_ids=list(dict.fromkeys(stops)))
        for text in _texts(prompts):
            tokens.append(await serving.renderer.encode_gap(marks, text, fields.suffix, longest, kept))
            await time_slice.offer()
        return tokens, params, options
    special = fields.add_special_tokens is not False
    for prompt in prompts:
        if isinstance(prompt, str):
            tokens.append(await serving.renderer.encode(prompt, special, longest, kept))
            await time_slice.offer()
        else:
            tokens.append(prompt)
    return tokens, params, options


def _check_room(serving: Serving, fields: CompletionRequest) -> None:
    """Refuse a request that would be turned away behind all the work of encoding its prompts, or could never run."""
    prompts, tokenizer, longest = fields.prompts, serving.text.tokenizer, serving.session.input_processor.longest
    check_num_sequences(len(prompts), fields.num_sequences, param="prompt")
    tokens = 0
    if fields.truncate_prompt_tokens is None:
        for prompt in prompts:
            fewest = len(prompt) if isinstance(prompt, list) else tokenizer.fewest_tokens(prompt) if tokenizer else 0
            check_length(fewest, longest)
            tokens += fewest
    sequences = len(prompts) * fields.num_sequences
    serving.session.check_room(sequences, sequences + tokens)


def _marks(serving: Serving) -> FillInMiddle:
    marks = serving.renderer.fill_in_middle
    if marks is None:
        raise RequestError(
            "suffix needs a model with fill-in-the-middle tokens, and this one's tokenizer has none: leave it out.",
            param="suffix",
        )
    return marks


def _texts(prompts: Sequence[Prompt]) -> list[str]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise RequestError("suffix needs prompts that are texts, not token ids.", param="suffix")
    return texts


def _serializer(
    serving: Serving, fields: CompletionRequest, params: SamplingParams, prompts: Sequence[Sequence[int]]
) -> CompletionSerializer:
    tokenizer = serving.text.tokenizer
    return CompletionSerializer(
        fields.token_names(tokenizer),
        params.num_reported is not None,
        fields.prompt_fields(prompts, tokenizer),
        echo=bool(fields.echo),
        token_ids=bool(fields.return_token_ids),
    )


def _sampling(serving: Serving, fields: CompletionRequest) -> SamplingParams:
    """The parameters. With `echo`, logprobs are the prompt's, too, and with max_tokens 0 one hidden token is
    sampled."""
    more: dict[str, Any] = {"max_tokens": DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens}
    if fields.only_echo:
        if fields.use_beam_search:
            raise RequestError("max_tokens must be at least 1 with use_beam_search, got 0.", param="max_tokens")
        more["max_tokens"] = 1
    if fields.echo and fields.logprobs is not None:
        if fields.stream:
            raise RequestError("echo with logprobs cannot be streamed: leave one of them out.", param="echo")
        if fields.use_beam_search:
            raise RequestError(
                "echo with logprobs cannot be combined with use_beam_search: leave it out.", param="echo"
            )
        more["prompt_logprobs"] = max(fields.logprobs, fields.prompt_logprobs or 0)
    text = serving.text.tokenizer is not None
    return fields.sampling(serving.text.defaults, text=text, logprobs=fields.logprobs, **more)


def add_generate(app: FastAPI, serving: Serving) -> None:
    @app.post("/inference/v1/generate", openapi_extra=openapi_body(GenerateRequest), tags=["generate"])
    async def generate(request: Request) -> Response:
        """Go on with token ids; the answer has token ids, no text."""
        return await serving.read_and_answer(request, GenerateRequest, answer_generate)


async def answer_generate(serving: Serving, request: Request, fields: GenerateRequest) -> Response:
    serving.accept(request, fields)
    with fields_named(fields.field_names):
        params, longest = fields.sampling(), serving.session.input_processor.longest
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
        options = fields.queue_options() | await serving.chat.output_options(params)
        collector = await serving.session.add_request([fields.token_ids], params, **options)
    tokenizer = serving.text.tokenizer
    choices = RequestChoices(serving.session, collector, tokenizer, names=fields.field_names)
    prompt = PromptFields(choices.prompts, params.n, tokenizer, show_logprobs=params.prompt_logprobs is not None)
    return await serving.respond(request, fields, choices, GenerateSerializer(params.num_reported, prompt))
