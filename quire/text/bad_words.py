"""Texts that an output must not have, as the token sequences that would make them. Knows nothing about requests."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import RequestError
from quire.text.tokenizer import Tokenizer


def bad_word_tokens(tokenizer: Tokenizer | None, words: Sequence[str] | None) -> list[list[int]]:
    """Each word at the beginning of a text and, where that is as long in tokens, behind a space: vLLM's rule.

    A text can be made of tokens in other ways as well, which this does not forbid.

    Raises:
        RequestError: There is no tokenizer.
    """
    if not words:
        return []
    if tokenizer is None:
        raise RequestError("bad_words need a tokenizer: there is none here.", param="bad_words")
    found: list[list[int]] = []
    texts = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
    encoded = tokenizer.encode_each(texts, add_special_tokens=False)
    for plain, spaced in zip(encoded[::2], encoded[1::2], strict=True):
        if not plain:
            raise RequestError("bad_words has a text without tokens.", param="bad_words")
        found.append(plain)
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return found
