"""What a result means: who gained which tokens, and who is over.

Owns reading a Result against the Step it belongs to. Frees nothing; knows nothing about slots or blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat

import numpy as np
import numpy.typing as npt

from quire.messages import EndReason, Result, TokenLogprobs
from quire.scheduler.lengths import Column, Lengths
from quire.scheduler.repetition import repeats
from quire.scheduler.request import Request
from quire.scheduler.roster import Roster
from quire.scheduler.step import Step

Mask = npt.NDArray[np.bool_]


@dataclass
class Settled:
    """What a settled step brought: tokens for each of `ids`, and requests that are over now."""

    ids: list[int]
    counts: list[int]
    """How many of `tokens` are each one's."""
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    """Empty when nobody asked."""
    ended: list[Request]
    prompt_logprobs: list[tuple[int, list[TokenLogprobs]]]
    """By id."""
    cached: list[tuple[int, int]]
    """(id, prompt tokens that were found computed), of those that gained their first token."""


@dataclass
class Movement:
    """What a step did to the lengths.

    Attributes:
        alive: By row, whether its request is not over.
        gained: By read, how many tokens such a request gained.
        fell: Rows of lengths whose `planned` fell, since they moved by less than they might have.
    """

    alive: Mask
    gained: Column
    fell: Column


@dataclass
class Gains:
    """Requests that gained tokens.

    Attributes:
        requests: Each at least one token, in batch order.
        rows: Theirs of lengths.
        counts: How many each.
        tokens: Flat.
        logprobs: Empty, or one entry a token.
    """

    requests: list[Request]
    rows: Column
    counts: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]

    @property
    def one_each(self) -> bool:
        """Whether nobody gained more than one."""
        return len(self.tokens) == len(self.requests)


def settle_lengths(step: Step, lengths: Lengths, result: Result) -> Movement:
    """Move what a step computed and drew into the lengths of requests that are not over."""
    alive = lengths.serial[step.rows] == step.serials
    current = alive & (lengths.epoch[step.rows] == step.epochs)
    reads = step.bounds > 0
    gained, moved, fell = step.bounds[reads], step.counts, step.rows[:0]
    if len(result.tokens) < step.most:
        counts = np.array(result.counts, dtype=np.int64)
        assert ((counts >= 0) & (counts <= gained)).all(), "a read gained more than it could"
        unused = step.bounds.copy()
        unused[reads] -= counts
        gained, moved = counts, step.counts - unused
        lengths.planned[step.rows[current]] -= unused[current]
        fell = step.rows[current & (unused > 0)]
    lengths.computed[step.rows[current]] += moved[current]
    lengths.drawing[step.rows[alive]] -= step.bounds[alive]
    alive_reads = alive[reads]
    if not alive_reads.all():
        gained = gained * alive_reads
    lengths.known[step.rows[reads]] += gained
    return Movement(alive, gained, fell)


def gains(step: Step, result: Result, gained: Column) -> Gains:
    """Who gained tokens, which, and their log probabilities if anybody asked; the requests have them now."""
    rows, kept = step.rows, gained.nonzero()[0]
    if len(kept) == len(rows):
        found = Gains(step.requests, rows, result.counts, result.tokens, result.logprobs)
    else:
        reads = step.bounds.nonzero()[0][kept]
        requests = [step.requests[i] for i in reads.tolist()]
        found = Gains(requests, rows[reads], gained[kept].tolist(), result.tokens, result.logprobs)
        if len(result.tokens) > gained.sum():
            # Tokens stand in the result for every read with a count, also of those that are over by now.
            starts = (np.cumsum(result.counts) - result.counts)[kept].tolist()
            spans = list(zip(starts, found.counts, strict=True))
            found.tokens = [token for start, count in spans for token in result.tokens[start : start + count]]
            found.logprobs = [entry for start, count in spans for entry in result.logprobs[start : start + count]]
    if found.one_each:
        for request, token in zip(found.requests, found.tokens, strict=True):
            request.tokens.append(token)
    else:
        tokens = iter(found.tokens)
        for request, count in zip(found.requests, found.counts, strict=True):
            request.tokens += islice(tokens, count)
    return found


def find_ends(found: Gains, lengths: Lengths, roster: Roster) -> list[Request]:
    """End requests at the first of their new tokens that does so; tokens behind it do not count, and are taken out."""
    ended, dropped = [], {}
    for index in sorted(_suspects(found, lengths, roster)):
        request, count = found.requests[index], found.counts[index]
        left = _end_within(request, count)
        if request.ended is not None:
            ended.append(request)
        if left < count:
            dropped[index] = left
    if dropped:
        _drop(found, dropped)
    return ended


def fail(step: Step, alive: Mask, errors: Sequence[tuple[int, str]]) -> list[Request]:
    """End requests whose row went wrong; what stands in their blocks is found no more."""
    failed = []
    readers = step.bounds.nonzero()[0]
    for read, message in errors:
        if alive[readers[read]]:
            request = step.requests[int(readers[read])]
            request.table.disown_contents()
            request.end("error", message)
            failed.append(request)
    return failed


def _suspects(found: Gains, lengths: Lengths, roster: Roster) -> set[int]:
    """Places in `found` of those that may be over; a few glances at all that spare looking at each."""
    suspects = set((lengths.known[found.rows] >= lengths.limit[found.rows]).nonzero()[0].tolist())
    if roster.may_stop(found.tokens):
        owners: Iterator[int] = iter(range(len(found.requests)))
        if not found.one_each:
            owners = chain.from_iterable(repeat(index, count) for index, count in enumerate(found.counts))
        requests = found.requests
        suspects |= {i for i, token in zip(owners, found.tokens, strict=True) if token in requests[i].stop_ids}
    if roster.watches_repetition:
        suspects |= {i for i, r in enumerate(found.requests) if r.add.sampling.repetition_detection is not None}
    return suspects


def _end_within(request: Request, count: int) -> int:
    """Of its last `count` tokens, how many count: up to the first that ends it."""
    before = len(request.tokens) - count
    for number in range(1, count + 1):
        reason = _reason(request, before + number)
        if reason is not None:
            del request.tokens[before + number :]
            request.end(reason)
            return number
    return count


def _reason(request: Request, length: int) -> EndReason | None:
    """Why it is over with so many tokens, if it is."""
    prompt_len, sampling = request.add.prompt_len, request.add.sampling
    if request.tokens[length - 1] in request.stop_ids and length - prompt_len >= sampling.min_tokens:
        return "stop"
    asked = sampling.repetition_detection
    if asked is not None and repeats(request.tokens[prompt_len:length], asked):
        return "repetition"
    return "length" if length >= request.limit else None


def _drop(found: Gains, left: dict[int, int]) -> None:
    """Take tokens out: of each place named, all but the first so many. The result's own columns stay as they are."""
    ends = np.cumsum(found.counts).tolist()
    found.counts, found.tokens, found.logprobs = list(found.counts), list(found.tokens), list(found.logprobs)
    for index in sorted(left, reverse=True):
        start = ends[index] - found.counts[index]
        del found.tokens[start + left[index] : ends[index]]
        del found.logprobs[start + left[index] : ends[index]]
        found.counts[index] = left[index]
