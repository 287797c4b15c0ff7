"""How choices look in answers: the parts in which completions and chat differ.

Owns the JSON of choices and log probabilities. Knows nothing about streams or the engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

from quire.api.prompt_report import PromptReport
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
    reports_logprobs: bool
    """Whether a chunk with text has more in it than that."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a stream's first chunk, if there is one before the text."""
        ...

    def gain(self, index: int, piece: Piece) -> dict[str, Any]:
        """The choice of a chunk with text."""
        ...

    def closing(self, index: int, piece: Piece) -> dict[str, Any]:
        """The choice of the chunk that ends it."""
        ...

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """What an answer that is not streamed has beside its head."""
        ...


class CompletionShape:
    """Choices of /v1/completions.

    Args:
        tokenizer: For the texts of tokens.
        logprobs: Whether log probabilities are shown.
        prompts: What is shown of them.
        echo: Put each prompt before its answer.
    """

    name = chunk_name = "text_completion"

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        logprobs: bool,
        prompts: PromptReport,
        *,
        echo: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self.reports_logprobs = logprobs
        self._prompts = prompts
        self._echo = echo
        self._offsets: defaultdict[int, int] = defaultdict(int)  # where each choice's text goes on

    def opening(self, index: int) -> dict[str, Any] | None:
        """See Shape."""
        if not self._echo:
            return None
        return {"index": index, "text": self._prompts.text(index), "logprobs": None, "finish_reason": None}

    def gain(self, index: int, piece: Piece) -> dict[str, Any]:
        """See Shape."""
        entry = self._entry(index, piece.tokens, piece.logprobs) if self.reports_logprobs else None
        return {"index": index, "text": piece.text, "logprobs": entry, "finish_reason": None}

    def closing(self, index: int, piece: Piece) -> dict[str, Any]:
        """See Shape."""
        return {"index": index, "text": "", "logprobs": None, **_end(piece)}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """See Shape."""
        return {"choices": [self._choice(index, pieces) for index in range(len(pieces))]}

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        piece = pieces[index]
        choice = self.gain(index, piece) if not self._echo else self._echoed(index, pieces)
        return choice | _end(piece) | self._prompts.shown(index, pieces)

    def _echoed(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        piece = pieces[index]
        choice = self.gain(index, Piece(self._prompts.text(index) + piece.text))
        if self.reports_logprobs:
            entries = [None, *self._prompts.entries(index, pieces), *piece.logprobs]
            choice["logprobs"] = self._entry(index, [*self._prompts.tokens(index), *piece.tokens], entries)
        return choice

    def _entry(self, index: int, ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """OpenAI's columns; a token without an entry is the first of a prompt."""
        tokens = [token_text(self._tokenizer, token) for token in ids]
        offsets = []
        for token in ids:
            offsets.append(self._offsets[index])
            self._offsets[index] += self._characters(token)
        tops: list[dict[str, float] | None] = []
        for text, entry in zip(tokens, entries, strict=True):
            if entry is None:
                tops.append(None)
                continue
            likeliest = zip(entry.top_ids, entry.top_logprobs, strict=True)
            top = {token_text(self._tokenizer, token): _finite(logprob) for token, logprob in likeliest}
            tops.append({text: _finite(entry.logprob)} | top)
        return {
            "text_offset": offsets,
            "token_logprobs": [entry and _finite(entry.logprob) for entry in entries],
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

    def __init__(self, tokenizer: Tokenizer | None, logprobs: int | None, role: str, prompts: PromptReport) -> None:
        self._tokenizer = tokenizer
        self.reports_logprobs = logprobs is not None
        self._logprobs = logprobs
        self._role = role
        self._prompts = prompts

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

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """See Shape."""
        choices = [self._choice(index, piece) for index, piece in enumerate(pieces)]
        return {"choices": choices, **self._prompts.shown(0, pieces)}

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
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
    return {**head, "object": shape.name, **shape.whole(pieces), "usage": usage}


def _end(piece: Piece) -> dict[str, Any]:
    return {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
