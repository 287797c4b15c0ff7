"""Where a dataset gets token ids and texts from: a tokenizer in this process, or the one of a running server."""

from __future__ import annotations

import random
import string
from typing import Protocol

import msgspec

from quire.errors import ConfigError, reason
from quire.foundation.http_client.answer_parser import HttpError
from quire.foundation.http_client.blocking_client import BlockingClient
from quire.text.tokenizer import Tokenizer

_LOWEST_ID = 3
"""Ids below this are special tokens in most vocabularies."""
_SAMPLE = string.printable + " ".join(a + b for a in string.ascii_lowercase for b in string.ascii_lowercase)


def has_tokenizer(http: BlockingClient, model: str) -> bool:
    """Whether the server takes text. A server that works on token ids only refuses to tokenize with status 400."""
    try:
        status, _ = http.ask("POST", "/tokenize", {"model": model, "prompt": "a"})
    except HttpError:
        return True
    return status != 400


class Tokens(Protocol):
    """A model's tokens."""

    def random_ids(self, count: int, rng: random.Random) -> list[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class LocalTokens:
    """Tokens of a tokenizer in this process, or of a vocabulary of this size alone, which has no texts."""

    def __init__(self, vocab_size: int, tokenizer: Tokenizer | None = None) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer

    def random_ids(self, count: int, rng: random.Random) -> list[int]:
        return rng.choices(range(min(_LOWEST_ID, self._vocab_size - 1), self._vocab_size), k=count)

    def encode(self, text: str) -> list[int]:
        return self._known().encode(text)

    def decode(self, ids: list[int]) -> str:
        return self._known().decode(ids)

    def _known(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigError("This dataset needs a tokenizer: give --tokenizer, or take --dataset-name random.")
        return self._tokenizer


class ServedTokens:
    """Tokens of a server's model, by /tokenize and /detokenize. Random ids are those of a sample text."""

    def __init__(self, http: BlockingClient, model: str) -> None:
        self._http = http
        self._model = model
        self._ids: list[int] = []

    def random_ids(self, count: int, rng: random.Random) -> list[int]:
        if not self._ids:
            self._ids = sorted(set(self.encode(_SAMPLE)))
        return rng.choices(self._ids, k=count)

    def encode(self, text: str) -> list[int]:
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        tokens: list[int] = self._asked("/tokenize", body)["tokens"]
        return tokens

    def decode(self, ids: list[int]) -> str:
        return str(self._asked("/detokenize", {"model": self._model, "tokens": ids})["prompt"])

    def _asked(self, path: str, body: dict[str, object]) -> dict[str, list[int]]:
        try:
            status, content = self._http.ask("POST", path, body)
            if status != 200:
                raise ValueError(f"it answers {status}")
            found: dict[str, list[int]] = msgspec.json.decode(content)
            return found
        except (HttpError, msgspec.DecodeError, ValueError) as error:
            raise ConfigError(
                f"The server does not {path.strip('/')} for this benchmark ({reason(error)}): "
                "give --tokenizer, or --vocab-size for random token ids."
            ) from error
