"""Pairs of texts in one sequence of tokens, as cross-encoders read them: what a tokenizer's file puts around and
between two texts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import tokenizers

Pair = tuple[str, str]


@dataclass(frozen=True)
class PairLimits:
    """How many tokens of pairs are kept; None for all.

    Attributes:
        whole: Of both texts with what stands around them. The longer text is cut first.
        first, second: Of the first and the second text, before that.
        cut_side: The end of a text that is cut off.
    """

    whole: int | None = None
    first: int | None = None
    second: int | None = None
    cut_side: Literal["left", "right"] = "right"


WHOLE_PAIRS = PairLimits()


def encode_pairs(
    core: tokenizers.Tokenizer, pairs: Sequence[Pair], limits: PairLimits
) -> list[tuple[list[int], list[int]]]:
    """The token ids of each pair, and their types: which text a token is of. Equal texts are encoded once.

    Raises:
        TypeError, UnicodeEncodeError: A text is no valid Unicode.
    """
    places = {text: place for place, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
    encoded = core.encode_batch_fast([*places], add_special_tokens=False)
    around = core.num_special_tokens_to_add(True)
    found = []
    for first, second in pairs:
        one, other = encoded[places[first]], encoded[places[second]]
        lengths = _kept(len(one), len(other), around, limits)
        whole = core.post_process(_cut(one, lengths[0], limits), _cut(other, lengths[1], limits))
        found.append((whole.ids, whole.type_ids))
    return found


def _cut(text: tokenizers.Encoding, length: int, limits: PairLimits) -> tokenizers.Encoding:
    if len(text) <= length:
        return text
    part = copy.copy(text)
    part.truncate(length, direction=limits.cut_side)
    return part


def _kept(first: int, second: int, around: int, limits: PairLimits) -> tuple[int, int]:
    """How many tokens of each text are kept, where both have so many and `around` stand beside them."""
    first = first if limits.first is None else min(first, limits.first)
    second = second if limits.second is None else min(second, limits.second)
    if limits.whole is None or first + second + around <= limits.whole:
        return first, second
    room = max(0, limits.whole - around)
    shorter = min(first, second, room // 2)
    return (shorter, room - shorter) if first <= second else (room - shorter, shorter)
