"""What a result means: who gained which token, and who is over.

Owns reading a Result against the Step it belongs to. Frees nothing; knows nothing about slots or blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.messages import Result, TokenLogprobs
from quire.scheduler.lengths import Column, Lengths
from quire.scheduler.repetition import end_repeating
from quire.scheduler.request import Request
from quire.scheduler.roster import Roster
from quire.scheduler.step import Step

Mask = npt.NDArray[np.bool_]


@dataclass
class Settled:
    """What a settled step brought: a token for each of `ids`, and requests that are over now."""

    ids: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    """Empty when nobody asked."""
    ended: list[Request]
    prompt_logprobs: list[tuple[int, list[TokenLogprobs]]]
    """By id."""
    cached: list[tuple[int, int]]
    """(id, prompt tokens that were found computed), of those that gained their first token."""


def settle_lengths(step: Step, lengths: Lengths, failed: bool, counts: Sequence[int]) -> tuple[Mask, Mask]:
    """Move what a step computed and drew into the lengths of requests that are not over.

    Returns:
        By row, whether its request is not over; by read, whether such a request gained a token.
    """
    alive = lengths.serial[step.rows] == step.serials
    current = alive & (lengths.epoch[step.rows] == step.epochs)
    lengths.computed[step.rows[current]] += step.counts[current]
    lengths.drawing[step.rows[alive & step.draws]] -= 1
    gained = alive[step.draws]
    if failed:
        gained &= np.array(counts, dtype=np.int64) > 0
    lengths.known[step.rows[step.draws][gained]] += 1
    return alive, gained


def gains(step: Step, result: Result, gained: Mask) -> tuple[list[Request], list[int], list[TokenLogprobs | None]]:
    """Requests that gained a token, their tokens, and log probabilities if anybody asked."""
    readers = step.requests
    if len(gained) < len(step.requests):
        readers = [step.requests[i] for i in np.flatnonzero(step.draws).tolist()]
    if gained.all():
        return readers, result.tokens, result.logprobs
    # Tokens stand in the result for every read with a count, also of those that are over by now.
    place = np.cumsum(result.counts) - 1
    kept = np.flatnonzero(gained).tolist()
    logprobs = [result.logprobs[int(place[i])] for i in kept] if result.logprobs else []
    return [readers[i] for i in kept], [result.tokens[int(place[i])] for i in kept], logprobs


def find_ends(
    requests: Sequence[Request], rows: Column, tokens: Sequence[int], lengths: Lengths, roster: Roster
) -> list[Request]:
    """End requests by the token they drew, by going in circles, or by count."""
    ended = []
    if roster.may_stop(tokens):
        for request, token in zip(requests, tokens, strict=True):
            if token in request.stop_ids and request.output_len >= request.add.sampling.min_tokens:
                request.end("stop")
                ended.append(request)
    if roster.watches_repetition:
        ended += end_repeating(requests)
    for index in np.flatnonzero(lengths.known[rows] >= lengths.limit[rows]).tolist():
        if requests[index].ended is None:
            requests[index].end("length")
            ended.append(requests[index])
    return ended


def fail(step: Step, alive: Mask, errors: Sequence[tuple[int, str]]) -> list[Request]:
    """End requests whose row went wrong; what stands in their blocks is found no more."""
    failed = []
    readers = np.flatnonzero(step.draws)
    for read, message in errors:
        if alive[readers[read]]:
            request = step.requests[int(readers[read])]
            request.table.disown_contents()
            request.end("error", message)
            failed.append(request)
    return failed
