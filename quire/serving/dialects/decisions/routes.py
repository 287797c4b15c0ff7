"""POST /v1/decisions: the probability of each option of questions about an input, by the first token of an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError, UnavailableError
from quire.sampling_params import SamplingParams
from quire.serving.api.prompt_renderer import Conversation
from quire.serving.api.request_body import openapi_body
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.request_work import TimeSlice, check_total
from quire.serving.api.schemas.known_fields import FieldNames, fields_named
from quire.serving.api.serving import Serving, json_response
from quire.serving.dialects.decisions.questions import Asked, answer, asked
from quire.serving.dialects.decisions.schemas import DECISION_FIELDS, DecisionRequest
from quire.text.deltas import ChoiceDelta
from quire.text.tokenizer import Tokenizer

NAMES = FieldNames({"prompt": "input", "messages": "input"})
_TAIL = 64
"""Characters of a prompt that decide how a label behind it is split into tokens."""


def add_decisions(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/decisions", openapi_extra=openapi_body(DecisionRequest), tags=["generate"])
    async def decide(request: Request) -> Response:
        """How likely each option of some questions is, about one text or conversation; nothing is written."""
        return await serving.read_and_answer(request, DecisionRequest, _answer, DECISION_FIELDS)


async def _answer(serving: Serving, request: Request, fields: DecisionRequest) -> Response:
    serving.accept_queued(request, fields)
    with fields_named(NAMES):
        serving.session.input_processor.check_generates()
        questions = [asked(each, f"questions[{place}]") for place, each in enumerate(fields.questions)]
        serving.session.check_room(len(questions), len(questions))
        prompts, labels = await _prompts(serving, fields, questions)
        ids = sorted({token for own in labels for token in own.values()})
        params = SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=ids)
        collector = await serving.session.add_request(prompts, params, **fields.queue_options())
    choices = RequestChoices(serving.session, collector, serving.text.tokenizer, names=NAMES)
    try:
        serving.log_request(request, choices.adds, stream=False)
        outputs = await choices.collect()
    finally:
        choices.close()
    answers = [
        answer(question, _of_labels(output, own))
        for question, output, own in zip(questions, outputs, labels, strict=True)
    ]
    return json_response(
        {"model": serving.model_name(fields.model), "answers": answers, "usage": _usage(choices.usage())}
    )


async def _prompts(
    serving: Serving, fields: DecisionRequest, questions: Sequence[Asked]
) -> tuple[list[list[int]], list[dict[str, int]]]:
    """The prompt of each question, and the token of each of its labels behind it."""
    renderer, longest = serving.renderer, serving.session.input_processor.longest
    time_slice, prompts, labels = TimeSlice(), list[list[int]](), list[dict[str, int]]()
    for question in questions:
        messages = fields.with_question(question.text)
        text = await renderer.render(Conversation(messages, add_generation_prompt=True, reasoning_effort="none"))
        prompts.append(await renderer.encode(text, False, longest))
        check_total(len(prompts[-1]) * len(questions), "input")  # each question repeats the whole input
        labels.append(_label_tokens(renderer.tokenizer, text, question.labels))
        await time_slice.offer()
    return prompts, labels


def _label_tokens(tokenizer: Tokenizer, text: str, labels: Sequence[str]) -> dict[str, int]:
    """The token that each label is behind a text. Raises RequestError if one takes several."""
    tail = text[-_TAIL:]
    before, *each = tokenizer.encode_each([tail, *(tail + label for label in labels)], add_special_tokens=False)
    for label, tokens in zip(labels, each, strict=True):
        if tokens[:-1] != before:
            raise RequestError(
                f"This model's tokenizer has no token for '{label}' behind its chat template, which decisions need.",
                param="model",
            )
    return {label: tokens[-1] for label, tokens in zip(labels, each, strict=True)}


def _of_labels(output: ChoiceDelta, labels: Mapping[str, int]) -> dict[str, float]:
    """The log probability of each label as the first token. Raises UnavailableError if the server ended the request
    before."""
    if not output.logprobs:
        raise UnavailableError("The server ended this request before it was computed. Send it again.")
    first = output.logprobs[0]
    known = dict(zip(first.top_ids, first.top_logprobs, strict=True))
    return {label: known[token] for label, token in labels.items()}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Token counts as the Responses API names them."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
