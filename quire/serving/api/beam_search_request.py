"""`use_beam_search` on the server: every step of the search is a request of one token for each live beam.

Owns the loop, and how what was found becomes choices, whole or as a stream: no token is certain before the last step,
so a stream begins once all is known. Blocks of what the steps before computed are found in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.foundation.messages.workers import TokenLogprobs
from quire.outputs import BeamSearchSequence
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.serving.api.request_choices import RequestChoices, usage_field
from quire.serving.api.request_work import TimeSlice
from quire.serving.api.session.session import EngineSession, check_num_sequences
from quire.serving.api.stream_response import AnswerFormat
from quire.text.beam_search import BatchedBeamSearch
from quire.text.deltas import ChoiceDelta
from quire.text.text_stream import TextStream
from quire.text.tokenizer import Tokenizer

PIECE_TOKENS = 32
"""A stream's chunks have the text of so many tokens, so that none takes long to write."""


@dataclass(frozen=True)
class FoundChoice:
    """A sequence that was found, as a choice of the response.

    Attributes:
        prompt: Token ids.
        sequence: The prompt's tokens, and the output's.
        logprobs: One for each token of the output; empty when not asked for.
    """

    prompt: Sequence[int]
    sequence: BeamSearchSequence
    logprobs: list[TokenLogprobs]

    @property
    def num_tokens(self) -> int:
        """Tokens of the output."""
        return len(self.sequence.tokens) - len(self.prompt)

    def pieces(self, tokenizer: Tokenizer | None, *, skip_special_tokens: bool) -> Iterator[ChoiceDelta]:
        """What is gained, a few tokens at a time; the last piece has the end."""
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
    """What was found, as choices of a response. Each prompt is counted once.

    Args:
        prompts: Token ids.
        found: The choices of all prompts, in order.
        tokenizer: For their texts.
        skip_special_tokens: As in SamplingParams.
    """

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
        """Every choice as a whole."""
        time_slice, choices = TimeSlice(), list[ChoiceDelta]()
        for pieces in self.pieces:
            choice = ChoiceDelta()
            for piece in pieces:
                choice.add(piece)
            choices.append(choice)
            await time_slice.offer()
        return choices

    def usage(self) -> dict[str, Any]:
        """Token counts of all choices."""
        return usage_field(self._prompt_tokens, sum(choice.num_tokens for choice in self._found))

    def usage_of(self, index: int, num_tokens: int | None = None) -> dict[str, int]:
        """Token counts of one choice with so many tokens, by default all."""
        choice = self._found[index]
        return usage_field(len(choice.prompt), choice.num_tokens if num_tokens is None else num_tokens)


class FoundStream:
    """Writes choices that are known already as a stream; see StreamWriter.

    Args:
        format: How it is written.
        choices: What is written.
    """

    def __init__(self, format: AnswerFormat, choices: FoundChoices) -> None:
        self.finished = False
        self.media_type = format.media_type
        self._format = format
        self._pieces = ((index, piece) for index, choice in enumerate(choices.pieces) for piece in choice)
        self._time_slice = TimeSlice()

    async def wait(self) -> None:
        """Everything is there."""

    def close(self) -> None:
        """Nothing runs."""

    async def next(self, write_now: Callable[[bytes], bool]) -> bytes:
        """The next piece, or the end."""
        await self._time_slice.offer()
        for index, piece in self._pieces:
            return self._format.delta(index, piece)
        self.finished = True
        return self._format.end()


async def run_beam_search(
    session: EngineSession,
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    eos_ids: Collection[int],
    options: dict[str, Any],
    num_reported: int | None,
) -> list[FoundChoice]:
    """The best sequences of each prompt, best first; all prompts go forward together.

    Args:
        options: See EngineSession.add_request.
        num_reported: Of how many likeliest tokens log probabilities are wanted; None for no log probabilities.

    Raises:
        RequestError: There are too many beams.
        QuireError: The engine could not go on.
    """
    check_num_sequences(len(prompts), params.beam_width)
    search = BatchedBeamSearch(prompts, params, eos_ids, num_reported)
    step = params.step(num_reported or 0)
    with session.keep_open():
        while not search.done:
            search.extend(await _next_tokens(session, search.queries, step, options))
    return [
        FoundChoice(prompt, sequence, logprobs)
        for prompt, *found in zip(prompts, search.results(), search.logprobs(), strict=True)
        for sequence, logprobs in zip(*found, strict=True)
    ]


async def _next_tokens(
    session: EngineSession, sequences: Sequence[Sequence[int]], params: SamplingParams, options: dict[str, Any]
) -> list[TokenLogprobs]:
    collector = await session.add_request(sequences, params, continuing=True, **options)
    choices = RequestChoices(session, collector, None)
    try:
        return [choice.logprobs[0] for choice in await choices.collect()]
    finally:
        choices.close()
