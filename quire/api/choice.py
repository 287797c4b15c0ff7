"""One sequence as a reader sees it: text, tokens and log probabilities, up to its end.

Owns joining the engine's deltas with the text stream, and which of them ended the sequence. Knows no answer format.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from quire.api.request_stream import Delta, RequestStream
from quire.api.session import EngineSession
from quire.messages import Add, End, EndReason, TokenLogprobs
from quire.text.stream import TextStream
from quire.text.tokenizer import Tokenizer


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


class Generation:
    """All choices of one request, read until the last one has ended.

    Attributes:
        choices: By index.
        prompt_tokens: Of all prompts together, each counted once.
    """

    def __init__(self, session: EngineSession, stream: RequestStream, tokenizer: Tokenizer | None) -> None:
        self._session = session
        self._stream = stream
        self.choices = [Choice(add, tokenizer) for add in stream.adds]
        self.prompt_tokens = sum(add.prompt_len for add in stream.adds[:: stream.adds[0].sampling.n])

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.num_tokens for choice in self.choices)

    def close(self) -> None:
        """Give back what still runs."""
        self._session.close_stream(self._stream)

    async def pieces(self) -> AsyncIterator[list[tuple[int, Piece]]]:
        """What each choice gained, a step at a time.

        Raises:
            QuireError: The request failed.
        """
        while not all(choice.finished for choice in self.choices):
            news = []
            for index, delta in await self._stream.read():
                if self.choices[index].finished:
                    continue
                piece = self.choices[index].take(delta)
                news.append((index, piece))
                if piece.finish_reason is not None:
                    self._session.stop(self._stream, index, piece.finish_reason)
            yield news

    async def collect(self) -> list[Piece]:
        """Every choice as a whole.

        Raises:
            QuireError: The request failed.
        """
        whole = [Piece() for _ in self.choices]
        async for news in self.pieces():
            for index, piece in news:
                whole[index].add(piece)
        return whole

    def usage(self) -> dict[str, int]:
        """OpenAI's token counts."""
        completion = self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + completion,
            "completion_tokens": completion,
        }
