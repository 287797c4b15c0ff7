"""All choices of one HTTP request, read until the last one has ended. Knows no answer format."""

from __future__ import annotations

from typing import Any

from quire.api.request_stream import AtOnce, RequestStream
from quire.api.session import EngineSession
from quire.text.choice import Choice, Delta, Piece
from quire.text.tokenizer import Tokenizer


class Generation:
    """All choices of one request, read until the last one has ended.

    Attributes:
        choices: By index.
        prompt_tokens: Of all prompts together, each counted once.
    """

    def __init__(
        self, session: EngineSession, stream: RequestStream, tokenizer: Tokenizer | None, *, answers: bool = True
    ) -> None:
        self._session = session
        self._answers = answers
        self._stream = stream
        self.choices = [Choice(add, tokenizer) for add in stream.adds]
        self._open = len(self.choices)
        self.prompt_tokens = sum(add.prompt_len for add in stream.adds[:: stream.adds[0].sampling.n])

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices so far; none where only the prompts are wanted."""
        return self._answers * sum(choice.num_tokens for choice in self.choices)

    def close(self) -> None:
        """Give back what still runs."""
        self._session.close_stream(self._stream)

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return self._open == 0

    async def read(self, at_once: AtOnce) -> list[tuple[int, Delta]]:
        """See RequestStream."""
        return await self._stream.read(at_once)

    def take(self, index: int, delta: Delta) -> Piece | None:
        """What a choice gained by what came; None when it had ended before."""
        choice = self.choices[index]
        if choice.finished:
            return None
        piece = choice.take(delta)
        if not self._answers:
            piece = Piece(prompt_logprobs=piece.prompt_logprobs, finish_reason=piece.finish_reason)
        self._session.took(self._stream, index, len(piece.tokens))
        if piece.finish_reason is not None:
            self._open -= 1
            self._session.stop(self._stream, index, piece.finish_reason)
        return piece

    async def collect(self) -> list[Piece]:
        """Every choice as a whole.

        Raises:
            QuireError: The request failed.
        """
        whole = [Piece() for _ in self.choices]

        def add(index: int, delta: Delta) -> bool:
            if (piece := self.take(index, delta)) is not None:
                whole[index].add(piece)
            return not self.finished

        while not self.finished:
            for index, delta in await self.read(add):
                add(index, delta)
        return whole

    def usage(self) -> dict[str, Any]:
        """OpenAI's token counts. Of prompts that have several choices, the first one's cached tokens count."""
        completion = self.completion_tokens
        cached = sum(choice.cached_tokens for choice in self.choices[:: self._stream.adds[0].sampling.n])
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
