"""How choices look in answers: the parts in which completions and chat differ.

Owns the JSON of choices and log probabilities. Knows nothing about streams or the engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

from quire.messages import TokenLogprobs
from quire.text.choice import Piece
from quire.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class Shape(Protocol):
    """One endpoint's way to write choices."""

    name: str
    """Of the answer's object."""
    chunk_name: str
    """Of a streamed chunk's object."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a stream's first chunk, if there is one before the text."""
        ...

    def gain(self, index: int, piece: Piece) -> dict[str, Any]:
        """The choice of a chunk with text."""
        ...

    def closing(self, index: int, piece: Piece) -> dict[str, Any]:
        """The choice of the chunk that ends it."""
        ...

    def whole(self, index: int, piece: Piece) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        ...


class CompletionShape:
    """Choices of /v1/completions."""

    name = chunk_name = "text_completion"

    def __init__(self, tokenizer: Tokenizer | None, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._offsets: defaultdict[int, int] = defaultdict(int)  # where each choice's text goes on

    def opening(self, index: int) -> dict[str, Any] | None:
        """See Shape."""
        return None

    def gain(self, index: int, piece: Piece) -> dict[str, Any]:
        """See Shape."""
        return {"index": index, "text": piece.text, "logprobs": self._entry(index, piece), "finish_reason": None}

    def closing(self, index: int, piece: Piece) -> dict[str, Any]:
        """See Shape."""
        return {"index": index, "text": "", "logprobs": None, **_end(piece)}

    def whole(self, index: int, piece: Piece) -> dict[str, Any]:
        """See Shape."""
        return self.gain(index, piece) | _end(piece)

    def _entry(self, index: int, piece: Piece) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        tokens = [token_text(self._tokenizer, token) for token in piece.tokens]
        offsets = []
        for token in piece.tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += self._characters(token)
        tops = []
        for text, entry in zip(tokens, piece.logprobs, strict=True):
            likeliest = zip(entry.top_ids, entry.top_logprobs, strict=True)
            top = {token_text(self._tokenizer, token): _finite(logprob) for token, logprob in likeliest}
            tops.append({text: _finite(entry.logprob)} | top)
        return {
            "text_offset": offsets,
            "token_logprobs": [_finite(entry.logprob) for entry in piece.logprobs],
            "tokens": tokens,
            "top_logprobs": tops,
        }

    def _characters(self, token: int) -> int:
        """How many characters of the text begin in a token."""
        data = self._tokenizer.token_bytes(token) if self._tokenizer else b""
        return sum(byte & 0xC0 != 0x80 for byte in data)


class ChatShape:
    """Choices of /v1/chat/completions."""

    name, chunk_name = "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer | None, logprobs: int | None, role: str) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._role = role

    def opening(self, index: int) -> dict[str, Any] | None:
        """See Shape."""
        delta = {"role": self._role, "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def gain(self, index: int, piece: Piece) -> dict[str, Any]:
        """See Shape."""
        delta = {"content": piece.text}
        return {"index": index, "delta": delta, "logprobs": self._entry(piece), "finish_reason": None}

    def closing(self, index: int, piece: Piece) -> dict[str, Any]:
        """See Shape."""
        return {"index": index, "delta": {}, "logprobs": None, **_end(piece)}

    def whole(self, index: int, piece: Piece) -> dict[str, Any]:
        """See Shape."""
        message = {"role": self._role, "content": piece.text}
        return {"index": index, "message": message, "logprobs": self._entry(piece), **_end(piece)}

    def _entry(self, piece: Piece) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        pairs = zip(piece.tokens, piece.logprobs, strict=True)
        return {"content": [self._token(token, entry, self._logprobs) for token, entry in pairs]}

    def _token(self, token: int, entry: TokenLogprobs, num_top: int) -> dict[str, Any]:
        likeliest = list(zip(entry.top_ids, entry.top_logprobs, strict=True))[:num_top]
        top = [self._one(other, logprob) for other, logprob in likeliest]
        return {**self._one(token, entry.logprob), "top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token) if self._tokenizer else b""
        return {"token": token_text(self._tokenizer, token), "logprob": _finite(logprob), "bytes": list(data)}


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """A token as log probabilities name it: its text, its bytes when they are no whole characters, or its number when
    nothing here knows texts."""
    if tokenizer is None:
        return f"token_id:{token}"
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def answer(head: dict[str, Any], shape: Shape, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
    """The whole body of an answer that is not streamed."""
    choices = [shape.whole(index, piece) for index, piece in enumerate(pieces)]
    return {**head, "object": shape.name, "choices": choices, "usage": usage}


def _end(piece: Piece) -> dict[str, Any]:
    return {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
