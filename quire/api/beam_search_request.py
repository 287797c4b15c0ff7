"""`use_beam_search` on the server: every step of the search is a request of one token for each live beam.

Owns the loop. Blocks of what the steps before computed are found in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from quire.api.engine_session import EngineSession, check_num_sequences
from quire.api.request_choices import RequestChoices
from quire.beam_search import BatchedBeamSearch, BeamSearchParams
from quire.messages import TokenLogprobs
from quire.outputs import BeamSearchSequence
from quire.sampling import SamplingParams
from quire.text.deltas import ChoiceDelta
from quire.text.text_stream import TextStream
from quire.text.tokenizer import Tokenizer


async def run_beam_search(
    session: EngineSession,
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    eos_ids: Collection[int],
    options: dict[str, Any],
) -> list[list[BeamSearchSequence]]:
    """The best sequences of each prompt, best first; all prompts go forward together.

    Args:
        options: See EngineSession.add_request.

    Raises:
        RequestError: There are too many beams.
        QuireError: The engine could not go on.
    """
    check_num_sequences(len(prompts), params.beam_width)
    search = BatchedBeamSearch(prompts, params, eos_ids)
    with session.keep_open():
        while not search.done:
            search.extend(await _next_tokens(session, search.queries, params.step(), options))
    return search.results()


async def _next_tokens(
    session: EngineSession, sequences: Sequence[Sequence[int]], params: SamplingParams, options: dict[str, Any]
) -> list[TokenLogprobs]:
    collector = await session.add_request(sequences, params, continuing=True, **options)
    choices = RequestChoices(session, collector, None)
    try:
        return [choice.logprobs[0] for choice in await choices.collect()]
    finally:
        choices.close()


def beam_choice(
    sequence: BeamSearchSequence, prompt: Sequence[int], tokenizer: Tokenizer | None, *, skip_special_tokens: bool
) -> ChoiceDelta:
    """A sequence that was found as a choice of the response."""
    tokens = sequence.tokens[len(prompt) :]
    sampling = SamplingParams(skip_special_tokens=skip_special_tokens)
    text = TextStream(tokenizer, sampling, prompt).push(tokens, final=True).text
    return ChoiceDelta(text, tokens, finish_reason=sequence.finish_reason, stop_reason=sequence.stop_reason)
