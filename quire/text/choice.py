"""One sequence as a reader sees it: text, tokens and log probabilities, up to its end.

Owns joining what the engine sends with the text stream, and which of the two ended the sequence. Used by the server and
by `LLM`; knows no answer format.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.messages import Add, End, EndReason, TokenLogprobs
from quire.text.stream import TextStream
from quire.text.tokenizer import Tokenizer


@dataclass
class Delta:
    """What one sequence gained since it was last read; `end` is set once, with or after its last tokens."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    end: End | None = None


@dataclass
class Piece:
    """What a choice gained, or, added up, the whole of it.

    Attributes:
        text: New text.
        tokens: New tokens, the ending one included.
        logprobs: One for each token; empty when not asked for.
        finish_reason: Set on the last piece.
        stop_reason: The stop string or the token of `stop_token_ids` that ended it.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: EndReason | None = None
    stop_reason: str | int | None = None

    def add(self, other: Piece) -> None:
        """Append a later piece."""
        self.text += other.text
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason


class Choice:
    """One sequence while it grows.

    Attributes:
        num_tokens: Tokens it has so far.
        finished: Whether its last piece was taken.
    """

    def __init__(self, add: Add, tokenizer: Tokenizer | None) -> None:
        self.num_tokens = 0
        self.finished = False
        self._stop_token_ids = frozenset(add.sampling.stop_token_ids or ())
        self._text = TextStream(tokenizer, add.sampling, add.tokens[: add.prompt_len], add.stop_ids)

    def take(self, delta: Delta) -> Piece:
        """What the engine's delta means to the reader."""
        seen = self._text.push(delta.tokens, final=delta.end is not None)
        used = seen.tokens_used
        piece = Piece(seen.text, delta.tokens[:used], [entry for entry in delta.logprobs[:used] if entry is not None])
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
