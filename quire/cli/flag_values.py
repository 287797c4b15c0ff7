"""How a flag's value is written: 4k for integers, JSON for dictionaries, words or a JSON list for lists.

One rule a type, in tyro's terms. Knows nothing about which flags there are.
"""

from __future__ import annotations

import functools
import json
import operator
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

_HUMAN_INTEGER = re.compile(r"(-?\d+(?:\.\d+)?)([kKmMgG]?)")
_MULTIPLES = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def registry() -> ConstructorRegistry:
    """The rules, for `tyro.cli`."""
    rules = ConstructorRegistry()
    rules.primitive_rule(_rule)
    return rules


def human_integer(text: str) -> int:
    """4k = 4,000, 4K = 4,096, and so on for m/M and g/G.

    Raises:
        ValueError: It is no whole number.
    """
    match = _HUMAN_INTEGER.fullmatch(text)
    value = float(match[1]) * _MULTIPLES[match[2]] if match else 0.5
    if match is None or value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(match[1]) * _MULTIPLES[match[2]] if "." not in match[1] else int(value)


def integer_or_auto(text: str) -> int | str:
    """As `human_integer`, or the word auto."""
    try:
        return text if text == "auto" else human_integer(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither a whole number nor auto") from None


def without_none(kind: Any) -> Any:
    """The type without None in its union; any other as it is."""
    if get_origin(kind) in (types.UnionType, Union):
        inner = [part for part in get_args(kind) if part is not type(None)]
        return functools.reduce(operator.or_, inner)
    return kind


def _rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    kind = without_none(info.type)
    optional = kind is not info.type
    if kind is int:
        return _single("INT", human_integer, str, optional)
    if kind == int | Literal["auto"]:
        return _single("{INT,auto}", integer_or_auto, str, optional)
    if kind is dict or get_origin(kind) is dict:
        return _single("JSON", _json_object, json.dumps, optional)
    if kind == tuple[str, ...]:
        return PrimitiveConstructorSpec(
            nargs="*", metavar="STR [STR ...]", instance_from_str=_strings,
            is_instance=lambda value: True, str_from_instance=lambda value: list(value or ()),
        )  # fmt: skip
    if optional and kind is str:
        return _single("STR", str, str, optional)
    if optional and kind is float:
        return _single("FLOAT", _number, str, optional)
    if optional and kind is bool:
        return _single("{true,false}", _boolean, str, optional)
    return None


def _single(
    metavar: str, read: Callable[[str], Any], write: Callable[[Any], str], optional: bool
) -> PrimitiveConstructorSpec[Any]:
    """A value of one word; None has no word of its own but for the help's default."""
    return PrimitiveConstructorSpec(
        nargs=1, metavar=metavar,
        instance_from_str=lambda words: None if optional and words[0] in ("None", "null") else read(words[0]),
        is_instance=lambda value: True, str_from_instance=lambda value: ["None" if value is None else write(value)],
    )  # fmt: skip


def _strings(words: list[str]) -> tuple[str, ...]:
    """Words as they are, or one JSON list of them."""
    if len(words) == 1 and words[0].startswith("["):
        values = json.loads(words[0])
        if not all(isinstance(value, str) for value in values):
            raise ValueError(f"{words[0]!r} is not a JSON list of strings")
        return tuple(values)
    return tuple(words)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def _boolean(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise ValueError(f"{text!r} is neither true nor false")
    return _BOOLEANS[text.lower()]
