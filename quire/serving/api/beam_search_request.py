"""`use_beam_search` on the server: every step of the search is a request of one token for each live beam.

No token is certain before the last step, so a stream begins once all is known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.foundation.config.model import ModelConfig
from quire.foundation.messages.workers import TokenLogprobs
from quire.outputs import BeamSearchSequence
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.serving.api.answers import Serializer, SseChunks
from quire.serving.api.request_choices import RequestChoices, usage_field
from quire.serving.api.request_work import TimeSlice
from quire.serving.api.schemas.sampling import SamplingFields
from quire.serving.api.serving import Serving, json_response
from quire.serving.api.session.session import EngineSession, check_num_sequences
from quire.serving.api.stream_response import AnswerFormat, StreamResponse
from quire.text.beam_search import BatchedBeamSearch
from quire.text.deltas import ChoiceDelta
from quire.text.text_stream import TextStream
from quire.text.tokenizer import Tokenizer

PIECE_TOKENS = 32
"""Tokens in each chunk of a stream, so that none takes long to write."""


@dataclass(frozen=True)
class FoundChoice:
    """A sequence of prompt and output that was found. `logprobs` has an entry for each token of the output, or none."""

    prompt: Sequence[int]
    sequence: BeamSearchSequence
    logprobs: list[TokenLogprobs]

    @property
    def num_tokens(self) -> int:
        return len(self.sequence.tokens) - len(self.prompt)

    def pieces(self, tokenizer: Tokenizer | None, *, skip_special_tokens: bool) -> Iterator[ChoiceDelta]:
        """The output, a few tokens at a time; the last piece has the end."""
        sequence, tokens = self.sequence, self.sequence.tokens[len(self.prompt) :]
        text = TextStream(tokenizer, SamplingParams(skip_special_tokens=skip_special_tokens), self.prompt)
        for start in range(0, max(1, len(tokens)), PIECE_TOKENS):
            stop = start + PIECE_TOKENS
            piece = ChoiceDelta(tokens=tokens[start:stop], logprobs=self.logprobs[start:stop])
            piece.text = text.push(piece.tokens, final=stop >= len(tokens)).text
            if stop >= len(tokens):
                piece.finish_reason, piece.stop_reason = sequence.finish_reason, sequence.stop_reason
            yield piece


class FoundChoices:
    """The choices of all prompts, in order. Each prompt is counted once."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        found: Sequence[FoundChoice],
        tokenizer: Tokenizer | None,
        *,
        skip_special_tokens: bool,
    ) -> None:
        self._prompt_tokens = sum(map(len, prompts))
        self._found = found
        self.pieces = [choice.pieces(tokenizer, skip_special_tokens=skip_special_tokens) for choice in found]

    async def collect(self) -> list[ChoiceDelta]:
        time_slice, choices = TimeSlice(), list[ChoiceDelta]()
        for pieces in self.pieces:
            choice = ChoiceDelta()
            for piece in pieces:
                choice.add(piece)
            choices.append(choice)
            await time_slice.offer()
        return choices

    def usage(self) -> dict[str, Any]:
        return usage_field(self._prompt_tokens, sum(choice.num_tokens for choice in self._found))

    def usage_of(self, index: int, num_tokens: int | None = None) -> dict[str, int]:
        """Token counts of one choice with so many tokens; None for all of its tokens."""
        choice = self._found[index]
        return usage_field(len(choice.prompt), choice.num_tokens if num_tokens is None else num_tokens)


class FoundStream:
    """Writes choices that are known already as a stream, in place of a StreamWriter."""

    def __init__(self, format: AnswerFormat, choices: FoundChoices) -> None:
        self.finished = False
        self.media_type = format.media_type
        self._format = format
        self._pieces = ((index, piece) for index, choice in enumerate(choices.pieces) for piece in choice)
        self._time_slice = TimeSlice()

    async def wait(self) -> None:
        """Return at once, because everything is there."""

    def close(self) -> None:
        """Do nothing, because nothing runs."""

    async def next(self, write_now: Callable[[bytes], bool]) -> bytes:
        """The next piece, or the end."""
        await self._time_slice.offer()
        for index, piece in self._pieces:
            return self._format.delta(index, piece)
        self.finished = True
        return self._format.end()


async def answer_with_beams(
    serving: Serving,
    request: Request,
    fields: SamplingFields,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    options: dict[str, Any],
    make_serializer: Callable[[Sequence[Sequence[int]]], Serializer],
) -> Response:
    """The response to a request with `use_beam_search`. `make_serializer` gets the prompts as they were truncated."""
    session = serving.session
    options = {name: value for name, value in options.items() if name != "collectors"}  # hundreds of short requests
    adds = session.checked_adds(prompts, params, options)
    prompts = [add.tokens[: add.prompt_len] for add in adds]
    beams = fields.beam_search(adds[0].sampling.max_tokens or 1)
    _check_beams(serving.config.model, beams)
    sequences = len(prompts) * beams.beam_width
    session.check_room(sequences, sum(map(len, prompts)) + sequences * beams.max_tokens)
    serializer = make_serializer(prompts)
    head = serving.head(request, fields, serializer)
    serving.log_request(request, adds, stream=bool(fields.stream))
    found = await _search(session, prompts, beams, serving.text.eos_ids, options, params.num_reported)
    skip = fields.skip_special_tokens is not False
    choices = FoundChoices(prompts, found, serving.text.tokenizer, skip_special_tokens=skip)
    format = SseChunks(head, serializer, choices, fields.streams_usage)
    if fields.stream:
        return StreamResponse(FoundStream(format, choices), serving.slow_reader_s)
    return json_response(await format.body())


def _check_beams(model: ModelConfig, params: BeamSearchParams) -> None:
    """Each step asks for the 2 × n likeliest tokens of a beam."""
    if model.logprobs_mode.endswith("logits"):
        raise RequestError(
            "use_beam_search needs log probabilities: this server was started with --logprobs-mode "
            f"{model.logprobs_mode}.",
            param="use_beam_search",
        )
    if 0 <= model.max_logprobs < 2 * params.beam_width:
        raise RequestError(
            f"n must be at most {model.max_logprobs // 2} with use_beam_search on this server, half of "
            f"--max-logprobs; got {params.beam_width}.",
            param="n",
        )


async def _search(
    session: EngineSession,
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    eos_ids: Collection[int],
    options: dict[str, Any],
    num_reported: int | None,
) -> list[FoundChoice]:
    """The best sequences of each prompt, best first; all prompts go forward together."""
    check_num_sequences(len(prompts), params.beam_width)
    search = BatchedBeamSearch(prompts, params, eos_ids, num_reported)
    step = params.step(num_reported or 0)
    with session.requests.keep_open():
        while not search.done:
            collector = await session.add_request(search.queries, step, continuing=True, **options)
            choices = RequestChoices(session, collector, None)
            try:
                search.extend([choice.logprobs[0] for choice in await choices.collect()])
            finally:
                choices.close()
    return [
        FoundChoice(prompt, sequence, logprobs)
        for prompt, *found in zip(prompts, search.results(), search.logprobs(), strict=True)
        for sequence, logprobs in zip(*found, strict=True)
    ]
