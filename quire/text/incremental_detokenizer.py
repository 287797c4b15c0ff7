"""Tokens to text, one at a time, without ever showing half a character.

Owns the bytes that do not make a whole character yet. Constant work a token, and the text does not depend on how the
tokens were grouped. Knows nothing about stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from quire.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one growing sequence.

    Bytes that are no UTF-8 become U+FFFD, one for each maximal part of a character (Unicode 15, section 3.9).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_tokens: Collection[int] = (),
        before: Sequence[int] = (),
    ) -> None:
        """
        Args:
            shown_tokens: Special tokens that are shown nevertheless.
            before: The last tokens of the prompt; empty when the text begins here.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        if shown_tokens:
            self._skipped = self._skipped.difference(shown_tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._inside = False  # of a character, whose first bytes the decoder holds
        self._at_start = all(token in self._skipped for token in before)

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        if token in self._skipped:
            return ""
        if self._at_start:
            self._at_start = False
            return self._decode(self._tokenizer.first_token_bytes(token))
        if not self._inside and (text := self._tokenizer.whole_text(token)) is not None:
            return text
        return self._decode(self._tokenizer.token_bytes(token))

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        self._inside = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """What remains when no token will follow: U+FFFD for a character that was not completed."""
        return self._decoder.decode(b"", final=True)
