"""Pieces of Lark, as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from llguidance import regex_to_lark

SpecialTokens = Mapping[str, int]
"""By text: tokens that stand for no text."""


def quoted(text: str) -> str:
    """A literal."""
    return json.dumps(text, ensure_ascii=False)


def pattern(regex: str) -> str:
    """A regular expression."""
    return f"/{regex_to_lark(regex, use_ascii='')}/"


def literal(text: str, special: SpecialTokens) -> str:
    """A text in which special tokens stand for themselves: "<|tool|>{" is the token <|tool|> and a brace."""
    if not text:
        return ""
    if not special:
        return quoted(text)
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    parts = [part for part in re.split(f"({names})", text) if part]
    return " ".join(f"<[{special[part]}]>" if part in special else quoted(part) for part in parts)
