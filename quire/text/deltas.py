"""What one sequence gained: from the engine (`SequenceDelta`, tokens), and as a reader sees it (`ChoiceDelta`, text).

Both add up: what was not read yet is merged with what comes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import structs

from quire.foundation.messages.from_engine import Deltas, End
from quire.foundation.messages.workers import TokenLogprobs
from quire.text.output_parsers.events import ContentDelta, OutputEvent

FinishReason = Literal["stop", "length", "abort", "error", "repetition", "tool_calls"]
"""Why a choice ended, as its reader sees it: the engine's reason, but `length` for `timeout`, and `tool_calls` where it
stopped behind calls."""


@dataclass(slots=True)
class SequenceDelta:
    """What the engine sent about one sequence since it was last read. `end` is set once, with or after the last
    tokens; `cached_tokens` once, with the first token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    end: End | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0

    def add(self, later: SequenceDelta) -> None:
        """Append what came later."""
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.end = later.end
        self.prompt_logprobs += later.prompt_logprobs
        self.cached_tokens += later.cached_tokens


def deltas_by_sequence(message: Deltas) -> dict[int, SequenceDelta]:
    """Split the columns of a step's message by sequence id."""
    news: dict[int, SequenceDelta] = {}
    at = 0
    for number, count in zip(message.ids, message.counts, strict=True):
        news[number] = SequenceDelta(message.tokens[at : at + count], message.logprobs[at : at + count])
        at += count
    for number, entries in message.prompt_logprobs:
        news.setdefault(number, SequenceDelta()).prompt_logprobs += entries
    for number, cached in message.cached_tokens:
        news.setdefault(number, SequenceDelta()).cached_tokens = cached
    for end in message.ends:
        news.setdefault(end.id, SequenceDelta()).end = end
    return news


def in_pieces(message: Deltas, most: int) -> list[Deltas]:
    """A step's message as several that say the same together, each about at most `most` sequences."""
    if len(message.ids) + len(message.ends) <= most:
        return [message]
    ends, cached, rows = {end.id: end for end in message.ends}, dict(message.cached_tokens), set(message.ids)
    sequences = [*message.ids, *(number for number in ends if number not in rows)]
    pieces, at = list[Deltas](), 0
    for first in range(0, len(sequences), most):
        numbers, counts = sequences[first : first + most], message.counts[first : first + most]
        begin, at = at, at + sum(counts)
        pieces.append(
            structs.replace(
                message,
                ids=numbers[: len(counts)],
                counts=counts,
                tokens=message.tokens[begin:at],
                logprobs=message.logprobs[begin:at],
                ends=[ends[number] for number in numbers if number in ends],
                prompt_logprobs=[] if pieces else message.prompt_logprobs,
                cached_tokens=[(number, cached[number]) for number in numbers if number in cached],
            )
        )
    return pieces


@dataclass(slots=True)
class ChoiceDelta:
    """What a choice gained, or, added up, the whole choice.

    Attributes:
        text: As the model wrote it.
        events: What an output parser says about the text, and about text before it that it held back; None without a
            parser, when the text is all content.
        tokens: New tokens, the ending one included.
        logprobs: One for each token; empty when not asked for.
        prompt_logprobs: One for each token of the prompt but the first; empty when not asked for.
        stop_reason: The stop string or the token of `stop_token_ids` that ended it; `timeout` beside `length` if its
            time was over.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    events: list[OutputEvent] | None = None

    @property
    def output(self) -> Sequence[OutputEvent]:
        if self.events is not None:
            return self.events
        return (ContentDelta(self.text),) if self.text else ()

    def add(self, other: ChoiceDelta) -> None:
        """Append a later delta."""
        self.text += other.text
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.prompt_logprobs += other.prompt_logprobs
        if other.events is not None:
            self.events = self.events or []
            self.events += other.events
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason
