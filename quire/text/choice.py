"""One sequence as a reader sees it: text, tokens and log probabilities, up to its end.

Owns joining what the engine sends with the text stream, and which of the two ended the sequence. Used by the server and
by `LLM`; knows no answer format.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.messages import Add, Deltas, End, EndReason, TokenLogprobs
from quire.text.stream import TextStream
from quire.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Delta:
    """What one sequence gained since it was last read; `end` is set once, with or after its last tokens, and
    `cached_tokens` with its first."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    end: End | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0

    def add(self, later: Delta) -> None:
        """Append what came later."""
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.end = later.end
        self.prompt_logprobs += later.prompt_logprobs
        self.cached_tokens += later.cached_tokens


def deltas_by_sequence(message: Deltas) -> dict[int, Delta]:
    """The columns of a step's message, cut into what each sequence gained."""
    news: dict[int, Delta] = {}
    at = 0
    for number, count in zip(message.ids, message.counts, strict=True):
        news[number] = Delta(message.tokens[at : at + count], message.logprobs[at : at + count])
        at += count
    for number, entries in message.prompt_logprobs:
        news.setdefault(number, Delta()).prompt_logprobs += entries
    for number, cached in message.cached_tokens:
        news.setdefault(number, Delta()).cached_tokens = cached
    for end in message.ends:
        news.setdefault(end.id, Delta()).end = end
    return news


@dataclass(slots=True)
class Piece:
    """What a choice gained, or, added up, the whole of it.

    Attributes:
        text: New text.
        tokens: New tokens, the ending one included.
        logprobs: One for each token; empty when not asked for.
        prompt_logprobs: One for each token of the prompt but the first; empty when not asked for.
        finish_reason: Set on the last piece.
        stop_reason: The stop string or the token of `stop_token_ids` that ended it.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: EndReason | None = None
    stop_reason: str | int | None = None

    def add(self, other: Piece) -> None:
        """Append a later piece."""
        self.text += other.text
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.prompt_logprobs += other.prompt_logprobs
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason


class Choice:
    """One sequence while it grows.

    Attributes:
        num_tokens: Tokens it has so far.
        cached_tokens: Tokens of its prompt that were found computed.
        finished: Whether its last piece was taken.
    """

    def __init__(self, add: Add, tokenizer: Tokenizer | None) -> None:
        self.num_tokens = 0
        self.cached_tokens = 0
        self.finished = False
        self._stop_token_ids = frozenset(add.sampling.stop_token_ids or ())
        self._text = TextStream(tokenizer, add.sampling, add.tokens[: add.prompt_len], add.stop_ids)

    @property
    def silent(self) -> bool:
        """Whether a reader sees its tokens alone, none of which means anything before the last."""
        return self._text.silent

    def take(self, delta: Delta) -> Piece:
        """What the engine's delta means to the reader."""
        seen = self._text.push(delta.tokens, final=delta.end is not None)
        used = seen.tokens_used
        logprobs = [entry for entry in delta.logprobs[:used] if entry is not None]
        piece = Piece(seen.text, delta.tokens[:used], logprobs, delta.prompt_logprobs)
        self.cached_tokens += delta.cached_tokens
        if seen.stop is not None:
            piece.finish_reason, piece.stop_reason = "stop", seen.stop
        elif delta.end is not None:
            piece.finish_reason = delta.end.reason
            piece.stop_reason = self._stop_token(delta, delta.end)
        self.num_tokens += used
        self.finished = piece.finish_reason is not None
        return piece

    def _stop_token(self, delta: Delta, end: End) -> int | None:
        last = delta.tokens[-1] if delta.tokens and end.reason == "stop" else None
        return last if last in self._stop_token_ids else None
