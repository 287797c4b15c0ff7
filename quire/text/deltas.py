"""What one sequence gained: from the engine (`SequenceDelta`, tokens), and as a reader sees it (`ChoiceDelta`, text).

Both add up: what is not read yet is merged with what comes later.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.messages import Deltas, End, EndReason, TokenLogprobs


@dataclass(slots=True)
class SequenceDelta:
    """What the engine sent about one sequence since it was last read.

    Attributes:
        end: Set once, with or after the last tokens.
        cached_tokens: Set once, with the first token.
    """

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


@dataclass(slots=True)
class ChoiceDelta:
    """What a choice gained, or, added up, the whole choice.

    Attributes:
        text: New text.
        tokens: New tokens, the ending one included.
        logprobs: One for each token; empty when not asked for.
        prompt_logprobs: One for each token of the prompt but the first; empty when not asked for.
        finish_reason: Set on the last delta.
        stop_reason: The stop string or the token of `stop_token_ids` that ended it.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: EndReason | None = None
    stop_reason: str | int | None = None

    def add(self, other: ChoiceDelta) -> None:
        """Append a later delta."""
        self.text += other.text
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.prompt_logprobs += other.prompt_logprobs
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason
