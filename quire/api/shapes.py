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
    text_only: bool
    """Whether chunks report text alone: no log probabilities and no token ids."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """Fields of the chunk that comes before a choice's text, if there is one: `choices` and what stands beside."""
        ...

    def gain(self, index: int, piece: Piece) -> dict[str, Any]:
        """The choice of a chunk with text or tokens."""
        ...

    def closing(self, index: int, piece: Piece) -> dict[str, Any]:
        """The choice of the chunk that ends it."""
        ...

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Fields of an answer that is not streamed, without its head."""
        ...


class CompletionShape:
    """Choices of /v1/completions.

    Args:
        tokenizer: For the texts of tokens.
        logprobs: Whether log probabilities are shown.
        prompts: What is shown of them.
        echo: Put each prompt before its answer.
        token_ids: Whether `prompt_token_ids` and `token_ids` are shown.
    """

    name = chunk_name = "text_completion"

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        logprobs: bool,
        prompts: PromptReport,
        *,
        echo: bool = False,
        token_ids: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self.text_only = not logprobs and not token_ids
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._prompts = prompts
        self._echo = echo
        self._offsets: defaultdict[int, int] = defaultdict(int)  # where each choice's text goes on

    def opening(self, index: int) -> dict[str, Any] | None:
        if not self._echo and not self._token_ids:
            return None
        text = self._prompts.text(index) if self._echo else ""
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        return {"choices": [choice | self._prompt_ids(index) | _ids([], self._token_ids)]}

    def gain(self, index: int, piece: Piece) -> dict[str, Any]:
        entry = self._entry(index, piece.tokens, piece.logprobs) if self._logprobs else None
        choice = {"index": index, "text": piece.text, "logprobs": entry, "finish_reason": None}
        return choice | _ids(piece.tokens, self._token_ids)

    def closing(self, index: int, piece: Piece) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, **_end(piece), **_ids([], self._token_ids)}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {"choices": [self._choice(index, pieces) for index in range(len(pieces))]}

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        piece = pieces[index]
        choice = self.gain(index, piece) if not self._echo else self._echoed(index, pieces)
        return choice | _end(piece) | self._prompts.shown(index, pieces) | self._prompt_ids(index)

    def _echoed(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        piece = pieces[index]
        choice = self.gain(index, Piece(self._prompts.text(index) + piece.text))
        choice |= _ids(piece.tokens, self._token_ids)
        if self._logprobs:
            entries = [None, *self._prompts.entries(index, pieces), *piece.logprobs]
            choice["logprobs"] = self._entry(index, [*self._prompts.tokens(index), *piece.tokens], entries)
        return choice

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompts.tokens(index)} if self._token_ids else {}

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

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        logprobs: int | None,
        role: str,
        prompts: PromptReport,
        *,
        token_ids: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self.text_only = logprobs is None and not token_ids
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._role = role
        self._prompts = prompts

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": self._role, "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {"choices": [choice | _ids([], self._token_ids)], **self._prompt_ids()}

    def gain(self, index: int, piece: Piece) -> dict[str, Any]:
        choice = {"index": index, "delta": {"content": piece.text}, "logprobs": self._entry(piece)}
        return {**choice, "finish_reason": None, **_ids(piece.tokens, self._token_ids)}

    def closing(self, index: int, piece: Piece) -> dict[str, Any]:
        return {"index": index, "delta": {}, "logprobs": None, **_end(piece), **_ids([], self._token_ids)}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        choices = [self._choice(index, piece) for index, piece in enumerate(pieces)]
        return {"choices": choices, **self._prompts.shown(0, pieces), **self._prompt_ids()}

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        message = {"role": self._role, "content": piece.text}
        choice = {"index": index, "message": message, "logprobs": self._entry(piece), **_end(piece)}
        return choice | _ids(piece.tokens, self._token_ids)

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompts.tokens(0)} if self._token_ids else {}

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


def _ids(tokens: list[int], shown: bool) -> dict[str, Any]:
    return {"token_ids": tokens} if shown else {}


def _end(piece: Piece) -> dict[str, Any]:
    return {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
