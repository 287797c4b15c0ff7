"""Checks whether a value of a request is one that its field can hold; if not, raises a RequestError that names it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quire.errors import RequestError

LARGEST = 2**63 - 1
"""Largest value of any integer: what messages between processes hold."""


def integer(name: str, value: Any, low: int, high: int = LARGEST) -> int:
    """Check for an integer, not a boolean, between `low` and `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {_shown(value)}.", param=name)
    if not low <= value <= high:
        bound = f"at least {low}" if high == LARGEST and value < low else f"between {low} and {high}"
        raise RequestError(f"{name} must be {bound}, got {_shown(value)}.", param=name)
    return value


def boolean(name: str, value: Any) -> None:
    """Check for true or false."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {_shown(value)}.", param=name)


def texts(name: str, value: Any) -> None:
    """Check for a list of texts."""
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise RequestError(f"{name} must be a list of strings, got {_shown(value)}.", param=name)


def number(name: str, value: Any) -> float:
    """Check for a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
        raise RequestError(f"{name} must be a finite number, got {_shown(value)}.", param=name)
    return float(value)


def number_between(name: str, value: Any, low: float, high: float) -> float:
    """Check for a number in a closed interval."""
    if not low <= number(name, value) <= high:
        raise RequestError(f"{name} must be in [{low:g}, {high:g}], got {_shown(value)}.", param=name)
    return float(value)


def token_ids(name: str, ids: Sequence[Any], most: int) -> None:
    """Check for at most `most` token ids. Whether a model has them is checked later."""
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise RequestError(f"{name} must be a list of token ids, got {_shown(ids)}.", param=name)
    if len(ids) > most:
        raise RequestError(f"{name} takes at most {most} ids, got {len(ids)}.", param=name)
    if set(map(type, ids)) <= {int} and min(ids, default=0) >= 0:
        return
    for token in ids:
        integer(name, token, 0)


def _finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _shown(value: Any) -> str:
    text = f"{value}" if isinstance(value, int | float) else repr(value)
    return text if len(text) <= 64 else text[:64] + "…"
