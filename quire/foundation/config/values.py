"""How the value of a setting is read, by the type of its field: from text, as on the command line, or from a Python
value, as in `LLM(...)`.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import os
import re
import types
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin

from quire.errors import ConfigError
from quire.validation import LARGEST

_HUMAN_INTEGER = re.compile(r"(-?\d+(?:\.\d+)?)([kKmMgG]?)")
_MULTIPLES = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_MAX_DIGITS = 64
_LONGEST_SHOWN = 80


def read_value(kind: Any, value: Any) -> Any:
    """Return the value of a field of this type: bool, int, float, str, Literal, `int | Literal["auto"]`, tuple[str,
    ...], dict, or one of them and None. `value` is text, whatever the type is, or a value of the type or close to it.
    Raises ValueError if the value does not suit the type."""
    inner = without_none(kind)
    if inner is not kind and (value is None or (isinstance(value, str) and value in ("None", "null"))):
        return None
    if get_origin(inner) is Literal:
        return _choice(get_args(inner), value)
    if inner == int | Literal["auto"]:
        is_auto = isinstance(value, str) and value == "auto"
        return value if is_auto else _integer(value, "neither a whole number nor auto")
    if inner == tuple[str, ...]:
        return _strings(value)
    if inner is dict or get_origin(inner) is dict:
        return _json_object(value)
    return _SCALARS[inner](value)


def check_range(part: object, least: float, most: float | None, *names: str) -> None:
    """Raise a ConfigError for settings of a part outside a closed interval, which it names. None is allowed."""
    for name in names:
        value = getattr(part, name)
        if value is not None and not least <= value <= (math.inf if most is None else most):
            limits = f"{least:.0f} or more" if most is None else f"{least:.0f} to {most:.0f}"
            raise ConfigError(f"--{name.replace('_', '-')} must be {limits}, got {value}.", param=name)


def check_positive(part: object, *names: str, advice: str = "") -> None:
    """Raise a ConfigError, which ends with the advice, for settings of a part that are 0 or less. None is allowed."""
    for name in names:
        value = getattr(part, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {value:g}{advice}.", param=name)


def is_readable(kind: Any) -> bool:
    """Whether `read_value` knows the type."""
    inner = without_none(kind)
    composed = inner in (int | Literal["auto"], tuple[str, ...]) or get_origin(inner) in (Literal, dict)
    return composed or inner in (dict, *_SCALARS)


def metavar(kind: Any) -> str:
    """The placeholder for a value of the type in help."""
    inner = without_none(kind)
    if get_origin(inner) is Literal:
        return f"{{{','.join(map(str, get_args(inner)))}}}"
    if inner == tuple[str, ...]:
        return "STR [STR ...]"
    if inner == int | Literal["auto"]:
        return "{INT,auto}"
    return {bool: "{true,false}", int: "INT", float: "FLOAT", str: "STR"}.get(inner, "JSON")


def without_none(kind: Any) -> Any:
    """The type without None in its union; any other type as it is."""
    if get_origin(kind) in (types.UnionType, Union):
        inner = [part for part in get_args(kind) if part is not type(None)]
        return functools.reduce(operator.or_, inner)
    return kind


def human_integer(text: str) -> int:
    """Read 4k as 4,000, 4K as 4,096, and so on for m/M and g/G. Raises ValueError if the text is no whole number."""
    match = _HUMAN_INTEGER.fullmatch(text) if len(text) <= _MAX_DIGITS else None
    value = float(match[1]) * _MULTIPLES[match[2]] if match else 0.5
    if match is None or value != int(value):
        raise ValueError(f"{_shown(text)} is not a whole number")
    return int(match[1]) * _MULTIPLES[match[2]] if "." not in match[1] else int(value)


def _integer(value: Any, complaint: str = "not a whole number") -> int:
    try:
        if isinstance(value, float):
            number = human_integer(str(value))
        else:
            number = int(value) if _is(Integral, value) else human_integer(_text(value))
    except ValueError:
        raise ValueError(f"{_shown(value)} is {complaint}") from None
    if abs(number) > LARGEST:
        raise ValueError(f"{_shown(value)} is too large")
    return number


def _number(value: Any) -> float:
    try:
        number = float(value if _is(Real, value) else _text(value))
    except (ValueError, OverflowError):
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{_shown(value)} is not a number")
    return number


def _boolean(value: Any) -> bool:
    text = str(value).lower() if isinstance(value, bool | int | str) else ""
    if text not in _BOOLEANS:
        raise ValueError(f"{_shown(value)} is neither true nor false")
    return _BOOLEANS[text]


def _is(kind: type, value: object) -> bool:
    """Whether a value is a number of that kind; true and false are not."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _text(value: Any) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise ValueError(f"{_shown(value)} is not a string")
    return text


_SCALARS: dict[Any, Callable[[Any], Any]] = {bool: _boolean, int: _integer, float: _number, str: _text}


def _choice(choices: tuple[Any, ...], value: Any) -> Any:
    text = str(value)
    if type(value).__module__ == "torch":  # torch.bfloat16 means bfloat16
        text = text.removeprefix("torch.")
    elif isinstance(value, bool) or not isinstance(value, str | int):
        text = ""
    for choice in choices:
        if text == str(choice):
            return choice
    raise ValueError(f"{_shown(value)} is not one of {', '.join(map(str, choices))}")


def _strings(value: Any) -> tuple[str, ...]:
    """Read a list of strings: from such a list, from one string, or from a JSON list in one string."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{_shown(value)} is not a list of strings")
    if len(texts) != 1 or not texts[0].startswith("["):
        return tuple(texts)
    try:
        values = json.loads(texts[0])
    except ValueError as error:
        raise ValueError(f"{_shown(texts[0])} is not JSON: {error}") from None
    if not all(isinstance(each, str) for each in values):
        raise ValueError(f"{_shown(texts[0])} is not a JSON list of strings")
    return tuple(values)


def _json_object(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{_shown(value)} is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError(f"{_shown(value)} is not a JSON object")
        return found
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{_shown(value)} is not a dict with strings as keys")
    return dict(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
