"""Command-line flags from dataclass fields: names, types, defaults, help and groups all come from `quire.config`.

Knows nothing about what a command does.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from quire.config import Config
from quire.config.foreign import FOREIGN, check_foreign
from quire.errors import ConfigError

Options = TypeVar("Options")

_HUMAN_INTEGER = re.compile(r"(-?\d+(?:\.\d+)?)([kKmMgG]?)")
_MULTIPLES = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


def parse_config(arguments: Sequence[str], program: str, description: str) -> Config:
    """Settings from flags; a first argument without dashes is the model.

    Raises:
        SystemExit: Wrong flags (code 2) or --help (code 0), after saying so.
    """
    arguments = list(arguments)
    if arguments and not arguments[0].startswith("-"):
        arguments[0:1] = ["--model", arguments[0]]
    try:
        arguments = _without_foreign(arguments)
    except ConfigError as error:
        print(f"quire: error: {error.message}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    return parse(tyro.conf.OmitArgPrefixes[Config], arguments, program, description)


def parse(options: type[Options], arguments: Sequence[str], program: str, description: str) -> Options:
    """An instance of the dataclass `options` from its fields' flags; see `parse_config` for what it raises."""
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_integer_rule)
    registry.primitive_rule(_json_rule)
    return tyro.cli(
        options, args=list(arguments), prog=program, description=description, registry=registry,
        config=(tyro.conf.AvoidSubcommands,),
    )  # fmt: skip


def _without_foreign(arguments: list[str]) -> list[str]:
    """Take flags out that have no effect here, with a warning each."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        negated = name.startswith("no_") and name[3:] in FOREIGN
        if not argument.startswith("--") or (name not in FOREIGN and not negated):
            kept.append(argument)
            continue
        setting = FOREIGN[name[3:] if negated else name]
        if setting.is_flag:
            warning = check_foreign(name[3:] if negated else name, not negated)
        else:
            warning = check_foreign(name, value if equals else next(rest, ""))
        print(f"quire: warning: {warning}", file=sys.stderr)
    return kept


def _integer_rule(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[int] | None:
    """Integers may be written 4k (4,000), 4K (4,096), 25.6k, 2G."""
    if info.type is not int:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1, metavar="INT", instance_from_str=lambda strings: human_integer(strings[0]),
        is_instance=lambda value: isinstance(value, int), str_from_instance=lambda value: [str(value)],
    )  # fmt: skip


def _json_rule(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """Dictionaries are written as JSON."""
    if info.type is not dict and getattr(info.type, "__origin__", None) is not dict:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1, metavar="JSON", instance_from_str=lambda strings: _json_object(strings[0]),
        is_instance=lambda value: isinstance(value, dict), str_from_instance=lambda value: [json.dumps(value)],
    )  # fmt: skip


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


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value
