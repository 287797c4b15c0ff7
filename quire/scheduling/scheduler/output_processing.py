"""What a step's result means: new tokens of each request, and which requests are over.

Owns reading a Result against the step it belongs to. Frees nothing; knows nothing about slots or blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, repeat

import numpy as np

from quire.foundation.messages.from_engine import EndReason
from quire.foundation.messages.workers import Result, TokenLogprobs
from quire.scheduling.scheduler.lengths import IntArray, Lengths
from quire.scheduling.scheduler.request import Request
from quire.scheduling.scheduler.request_table import RequestTable
from quire.scheduling.scheduler.step import ScheduledStep


@dataclass
class StepOutputs:
    """What a processed step brought: tokens for each of `ids`, and requests that are over now.

    Attributes:
        counts: How many of `tokens` belong to each id.
        logprobs: Empty when nobody asked.
        prompt_logprobs: By id.
        cached_tokens: (id, prompt tokens found in the prefix cache), with the first token of a request.
    """

    ids: list[int]
    counts: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    ended: list[Request]
    prompt_logprobs: list[tuple[int, list[TokenLogprobs]]]
    cached_tokens: list[tuple[int, int]]


@dataclass
class NewTokens:
    """Requests with new tokens, at least one each, in batch order.

    Attributes:
        counts: How many tokens each request has.
        tokens: Of all requests, one after the other.
        logprobs: Empty, or one entry for each token.
    """

    requests: list[Request]
    index: IntArray
    counts: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]

    @property
    def one_each(self) -> bool:
        """Whether each request has exactly one."""
        return len(self.tokens) == len(self.requests)


def update_lengths(step: ScheduledStep, lengths: Lengths, result: Result) -> tuple[IntArray, IntArray]:
    """Move what a step computed and sampled into the lengths of requests that are not over. Returns the new tokens of
    each sampled row's request, 0 if it is over, and the indices into Lengths where `planned` fell, since the step
    brought fewer tokens than it might have.

    Example (B of `Step.move`): its row computed 4 tokens, 3 of them drafts, so it could bring 4. Before: computed 12,
    planned 16, known 13, in_flight_tokens 4. It brings 2: one draft is accepted, two are not (`unused`):

        planned 16 → 14, computed 12 → 12 + 4 - 2 = 14, known 13 → 15, in_flight_tokens 4 → 0.

    The 15th token is known, but its keys are not computed yet: it is the input of the next row. A request that was
    reset since (another epoch) keeps its new tokens, but `planned` and `computed` began again at 0 and stay.
    """
    index, most, counts = step.index, step.max_new_tokens, step.counts
    alive = lengths.serial[index] == step.serials
    current = alive & (lengths.epoch[index] == step.epochs)
    sampled = most > 0
    if len(result.tokens) == step.total_max_new_tokens and current.all():  # by far the most frequent
        lengths.computed[index] += counts
        lengths.in_flight_tokens[index] -= most
        lengths.known[index] += most
        return most[sampled], index[:0]
    num_sampled, shrunk = most[sampled], index[:0]
    if len(result.tokens) < step.total_max_new_tokens:
        brought = np.array(result.counts, dtype=np.int64)
        assert ((brought >= 0) & (brought <= num_sampled)).all(), "a row brought more tokens than it could"
        unused = most.copy()
        unused[sampled] -= brought
        num_sampled, counts = brought, counts - unused
        lengths.planned[index[current]] -= unused[current]
        shrunk = index[current & (unused > 0)]
    lengths.computed[index[current]] += counts[current]
    lengths.in_flight_tokens[index[alive]] -= most[alive]
    if not alive[sampled].all():
        num_sampled = num_sampled * alive[sampled]
    lengths.known[index[sampled]] += num_sampled
    return num_sampled, shrunk


def append_tokens(step: ScheduledStep, result: Result, num_sampled: IntArray) -> NewTokens:
    """Append new tokens to their requests, and return them with their log probabilities."""
    kept = num_sampled.nonzero()[0]
    if len(kept) == len(step.index):
        new = NewTokens(step.requests, step.index, result.counts, result.tokens, result.logprobs)
    else:
        rows = step.max_new_tokens.nonzero()[0][kept]
        requests = [step.requests[row] for row in rows.tolist()]
        new = NewTokens(requests, step.index[rows], num_sampled[kept].tolist(), result.tokens, result.logprobs)
        if len(result.tokens) > num_sampled.sum():
            # The result has tokens of rows whose requests are over by now: leave them out.
            starts = (np.cumsum(result.counts) - result.counts)[kept].tolist()
            spans = list(zip(starts, new.counts, strict=True))
            new.tokens = [token for start, count in spans for token in result.tokens[start : start + count]]
            new.logprobs = [entry for start, count in spans for entry in result.logprobs[start : start + count]]
    if new.one_each:
        for request, token in zip(new.requests, new.tokens, strict=True):
            request.tokens.append(token)
    else:
        tokens = iter(new.tokens)
        for request, count in zip(new.requests, new.counts, strict=True):
            request.tokens += islice(tokens, count)
    return new


def check_stops(new: NewTokens, lengths: Lengths, request_table: RequestTable) -> list[Request]:
    """End requests at the first new token that stops them, and remove the tokens behind it."""
    ended, kept = [], {}
    for place in sorted(_may_have_stopped(new, lengths, request_table)):
        request, count = new.requests[place], new.counts[place]
        left = _end_at_first_stop(request, count)
        if request.ended is not None:
            ended.append(request)
        if left < count:
            kept[place] = left
    if kept:
        _remove_tokens(new, kept)
    return ended


def fail_rows(step: ScheduledStep, result: Result) -> list[Request]:
    """End requests whose row failed, and take their blocks out of the prefix cache, even of a request that was
    preempted or has ended since the step was planned. A request that an accepted draft stops does not fail."""
    failed = []
    rows = step.max_new_tokens.nonzero()[0]
    for place, message in result.errors:
        request = step.requests[int(rows[place])]
        request.invalidate()
        if request.ended is None:
            request.end("refused" if place in result.refused else "error", message)
            failed.append(request)
    return failed


def take_vectors(step: ScheduledStep, lengths: Lengths, result: Result) -> list[Request]:
    """Give pooled requests what a step brought, and end those whose text ends with it, or whose row failed. What was
    planned before a preemption is dropped, because all of it is computed again."""
    ended = []
    for pooled, vector in zip(step.pooled_rows, result.vectors, strict=True):
        request = step.requests[pooled.row]
        if vector.error:
            request.invalidate()
        if request.ended is not None or lengths.epoch[request.index] != step.epochs[pooled.row]:
            continue
        if vector.error:
            request.end("error", vector.error)
            ended.append(request)
            continue
        request.vectors += [vector] if vector.shape else []
        if pooled.is_last:
            request.end("stop")
            ended.append(request)
    return ended


def _may_have_stopped(new: NewTokens, lengths: Lengths, request_table: RequestTable) -> set[int]:
    """Places in `new` of requests that may be over, found without looking at each request."""
    places = set((lengths.known[new.index] >= lengths.limit[new.index]).nonzero()[0].tolist())
    if request_table.any_stop_token(new.tokens):
        owners: Iterator[int] = iter(range(len(new.requests)))
        if not new.one_each:
            owners = chain.from_iterable(repeat(place, count) for place, count in enumerate(new.counts))
        requests = new.requests
        places |= {i for i, token in zip(owners, new.tokens, strict=True) if token in requests[i].stop_ids}
    if request_table.detects_repetition:
        places |= {i for i, r in enumerate(new.requests) if r.repetition is not None}
    return places


def _end_at_first_stop(request: Request, count: int) -> int:
    """How many of a request's last `count` tokens remain: those up to the first that stops it."""
    before = len(request.tokens) - count
    for number in range(1, count + 1):
        reason = _stop_reason(request, before + number)
        if reason is not None:
            del request.tokens[before + number :]
            request.end(reason)
            return number
    return count


def _stop_reason(request: Request, length: int) -> EndReason | None:
    """Why a request is over with so many tokens; None if it is not."""
    prompt_len, sampling = request.add.prompt_len, request.add.sampling
    if request.tokens[length - 1] in request.stop_ids and length - prompt_len >= sampling.min_tokens:
        return "stop"
    if request.repetition is not None and request.repetition.append(request.tokens[length - 1]):
        return "repetition"
    return "length" if length >= request.limit else None


def _remove_tokens(new: NewTokens, kept: dict[int, int]) -> None:
    """Keep only so many tokens at each place named. The result's own lists stay as they are."""
    ends = np.cumsum(new.counts).tolist()
    new.counts, new.tokens, new.logprobs = list(new.counts), list(new.tokens), list(new.logprobs)
    for place in sorted(kept, reverse=True):
        start = ends[place] - new.counts[place]
        del new.tokens[start + kept[place] : ends[place]]
        del new.logprobs[start + kept[place] : ends[place]]
        new.counts[place] = kept[place]


@dataclass
class DraftCounts:
    """How many draft tokens there were since the start, and how many of them were accepted.

    Attributes:
        drafts: Rows that had draft tokens.
        accepted: Accepted draft tokens, by their position in the draft.
    """

    drafts: int = 0
    tokens: int = 0
    accepted: list[int] = field(default_factory=list)

    def count(self, result: Result) -> None:
        """Count the draft tokens of a step."""
        for gained, drafted in zip(result.counts, result.drafted, strict=True):
            if drafted:
                self.drafts += 1
                self.tokens += drafted
                self.accepted += [0] * (drafted - len(self.accepted))
                for position in range(gained - 1):
                    self.accepted[position] += 1
