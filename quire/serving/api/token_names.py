"""How log probabilities name tokens, and their form in OpenAI's chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.foundation.messages.workers import TokenLogprobs
from quire.serving.api.json_pieces import encode_in_slices
from quire.text.deltas import ChoiceDelta
from quire.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(frozen=True)
class TokenNames:
    """Names of one model's tokens.

    Attributes:
        tokenizer: None on a server without one.
        as_ids: Name every token by its id (`return_tokens_as_token_ids`).
    """

    tokenizer: Tokenizer | None
    as_ids: bool = False

    def text(self, token: int) -> str:
        """A token's text; `bytes:\\x…` when it is no whole characters; `token_id:…` when ids are asked for, or there is
        no tokenizer."""
        if self.as_ids or self.tokenizer is None:
            return f"token_id:{token}"
        data = self.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bytes(self, token: int) -> list[int]:
        """What the token adds to the text."""
        return list(self.tokenizer.token_bytes(token)) if self.tokenizer else []

    def num_characters(self, token: int) -> int:
        """How many characters of the text begin in the token."""
        data = self.tokenizer.token_bytes(token) if self.tokenizer else b""
        return sum(byte & 0xC0 != 0x80 for byte in data)


def finite(logprob: float) -> float:
    """A log probability that JSON can hold."""
    return max(logprob, LOWEST_LOGPROB)


def chat_logprobs(names: TokenNames, num_top: int, delta: ChoiceDelta) -> dict[str, list[Any]]:
    """The log probabilities of a delta's tokens, in the form of a chat choice's `logprobs`."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": names.text(token), "logprob": finite(logprob), "bytes": names.bytes(token)}

    content = []
    for token, entry in zip(delta.tokens, delta.logprobs, strict=True):
        likeliest = list(zip(entry.top_ids, entry.top_logprobs, strict=True))[:num_top]
        top = [one(other, logprob) for other, logprob in likeliest]
        content.append({**one(token, entry.logprob), "top_logprobs": top})
    return {"content": content}


async def encode_chat_logprobs(names: TokenNames, num_top: int | None, choice: ChoiceDelta) -> dict[str, Any] | None:
    """Encode the log probabilities of a whole choice as JSON; None if the request did not ask for them."""
    if num_top is None:
        return None
    return await encode_in_slices(
        lambda start, end: chat_logprobs(
            names, num_top, ChoiceDelta(tokens=choice.tokens[start:end], logprobs=choice.logprobs[start:end])
        ),
        len(choice.tokens),
        entries_per_row(choice.logprobs),
    )


def entries_per_row(entries: Sequence[TokenLogprobs | None]) -> int:
    """How many entries one token has, which `encode_in_slices` takes as the cost of a row."""
    return 1 + max((len(entry.top_ids) for entry in entries[:2] if entry is not None), default=0)
