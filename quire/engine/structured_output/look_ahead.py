"""Patterns that look ahead, as several patterns that do not: the compiler has no look-around.

Two forms can be translated exactly: `^(?=A)B` is `^A` and `^B`; and `^(?![abc]*$)B` is `[^abc]` and `^B`, since a text
that is not made of certain characters alone has another one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_BEGINNING = re.compile(r"\^?\(\?[=!]")
_OF_CHARACTERS = re.compile(r"\^?(\[[^\]\\]*(?:\\.[^\]\\]*)*\]|\\[sSdDwW])[*]\$")


def without_look_ahead(pattern: str) -> list[str] | None:
    """Patterns without look-ahead that all match exactly where this pattern does; None if there are none."""
    if "(?=" not in pattern and "(?!" not in pattern:
        return [pattern]
    found: list[str] = []
    if not pattern.startswith(("^", "(?=^")):
        return None  # it would look ahead from anywhere
    rest = pattern.removeprefix("^")
    while _BEGINNING.match(rest):
        rest = rest.removeprefix("^")
        end = _end_of_group(rest)
        if end is None:
            return None
        negative, inner = rest[2] == "!", rest[3 : end - 1]
        if negative:
            characters = _OF_CHARACTERS.fullmatch(inner)
            if characters is None:
                return None
            found.append(_other_than(characters[1]))
        else:
            found.append(f"^(?:{inner.removeprefix('^')})")
        rest = rest[end:]
    rest = rest.removeprefix("^")
    if rest:
        found.append(f"^{rest}")
    if _alternatives_at_top(rest) or any("(?=" in each or "(?!" in each or "(?<" in each for each in found):
        return None
    return found


def _other_than(characters: str) -> str:
    """The class of all other characters."""
    if characters.startswith("\\"):
        return characters.swapcase()
    return f"[{characters[2:]}" if characters.startswith("[^") else f"[^{characters[1:]}"


def _end_of_group(pattern: str) -> int | None:
    """The place behind the group that a pattern begins with."""
    return next((at + 1 for at, _, depth in _outside_classes(pattern) if depth == 0), None)


def _alternatives_at_top(pattern: str) -> bool:
    return any(character == "|" and depth == 0 for _, character, depth in _outside_classes(pattern))


def _outside_classes(pattern: str) -> Iterator[tuple[int, str, int]]:
    """The characters that are neither escaped nor within brackets: place, character, and depth of groups behind it."""
    at, within, depth = 0, False, 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 2
            continue
        if within:
            within = character != "]"
        elif character == "[":
            within = True
        else:
            depth += (character == "(") - (character == ")")
            yield at, character, depth
        at += 1
