"""How log probabilities name tokens."""

from __future__ import annotations

from dataclasses import dataclass

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
