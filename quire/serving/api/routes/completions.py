"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.sampling_params import SamplingParams
from quire.serving.api.json_pieces import check_answer_size
from quire.serving.api.prompt_renderer import check_length
from quire.serving.api.request_body import openapi_body, read_body
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.request_work import TimeSlice, cancel_on_disconnect
from quire.serving.api.schemas.completion import CompletionRequest, Prompt
from quire.serving.api.serializers import CompletionSerializer
from quire.serving.api.serving import Serving
from quire.serving.api.session.session import check_num_sequences
from quire.text.fill_in_middle import FillInMiddle

DEFAULT_MAX_TOKENS = 16


def add_completions(app: FastAPI, serving: Serving) -> None:
    """Text goes on."""

    @app.post("/v1/completions", openapi_extra=openapi_body(CompletionRequest), tags=["generate"])
    async def complete(request: Request) -> Response:
        """Go on with one or several prompts."""
        serving.refuse_if_full()
        fields = await read_body(request, CompletionRequest)
        return await cancel_on_disconnect(request, answer_completion(serving, request, fields))


async def answer_completion(serving: Serving, request: Request, fields: CompletionRequest) -> Response:
    """The response to prompts that go on."""
    serving.accept(request, fields)
    _check_room(serving, fields)
    tokens, params, options = await prepare_completion(serving, fields)
    check_answer_size(
        [len(prompt) for prompt in tokens],
        params,
        num_choices=fields.num_sequences,
        longest=serving.session.submission.longest,
        prompts_shown=fields.num_sequences * (bool(fields.echo) or fields.prompt_fields(tokens, None).shown),
        held=fields.held,
    )
    if fields.use_beam_search:
        return await serving.respond_with_beams(
            request, fields, tokens, params, options, lambda prompts: _serializer(serving, fields, params, prompts)
        )
    collector = await serving.session.add_request(tokens, params, **options)
    choices = RequestChoices(serving.session, collector, serving.text.tokenizer, show_output=not fields.only_echo)
    return await serving.respond(request, fields, choices, _serializer(serving, fields, params, choices.prompts))


async def prepare_completion(
    serving: Serving, fields: CompletionRequest
) -> tuple[list[list[int]], SamplingParams, dict[str, Any]]:
    """Token ids of each prompt, sampling parameters, and options as EngineSession.add_request takes them.

    Raises:
        RequestError: A field is wrong; the error names it.
        UnavailableError: No work is taken now.
    """
    longest = serving.session.submission.longest
    params = _sampling(serving, fields)
    options = fields.options() | await serving.session.grammar_options(params)
    options["bad_words"] = await serving.renderer.bad_words(fields.bad_words)
    options["thinking"] = serving.chat.parsers.budget(params, hints=serving.chat.hints)
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
    """Refuse what would be turned away behind all the work of encoding its prompts, and what could never run."""
    prompts, tokenizer, longest = fields.prompts, serving.text.tokenizer, serving.session.submission.longest
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
    """With `echo`, log probabilities are the prompt's as well, and max_tokens may be 0: then one token is sampled, and
    not shown."""
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
