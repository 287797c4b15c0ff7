"""The fields behind a command's flags: names, types, groups and descriptions, of a dataclass and those in it; and the
values that `--config file.yaml` has for them.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Collection
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from quire.errors import ConfigError, did_you_mean, reason
from quire.foundation.config import Config

OWN_GROUP = "options"
"""Group of the fields that belong to no part."""


@dataclass(frozen=True)
class Setting:
    """One field.

    Attributes:
        group: The name of the part that it belongs to.
        kind: Its type, with annotations for the command line.
        default: As in `dataclasses.field`.
        description: The string below the field.
    """

    name: str
    group: str
    kind: Any
    default: Any
    description: str


def settings_of(options: type) -> list[Setting]:
    """All fields of `options`; a dataclass in it is replaced by its fields."""
    found: list[Setting] = []
    hints = get_type_hints(options, include_extras=True)
    own = descriptions(options)
    for each in fields(options):
        kind = hints[each.name]
        if is_dataclass(kind):
            inner = settings_of(kind) if isinstance(kind, type) else []
            found += [replace(setting, group=each.name) for setting in inner]
        else:
            found.append(Setting(each.name, OWN_GROUP, kind, _default(each), own.get(each.name, "")))
    return found


def descriptions(part: type) -> dict[str, str]:
    """The string below each field of a dataclass, on one line."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
    except (OSError, TypeError, ValueError):  # a class made at run time, whose parts have the descriptions
        return {}
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    return {
        each.target.id: " ".join(below.value.value.split())
        for each, below in pairwise(body)
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


def with_engine(options: type) -> type:
    """A dataclass with `options` (as `own`) and every part of Config except the server's."""
    parts = [(part.name, type(getattr(Config(), part.name))) for part in fields(Config) if part.name != "server"]
    columns = [("own", options), *parts]
    return make_dataclass("Settings", [(n, kind, field(default_factory=kind)) for n, kind in columns], frozen=True)


def engine_config(settings: Any) -> Config:
    """The Config in an instance of a class from `with_engine`."""
    return Config(**{part.name: getattr(settings, part.name) for part in fields(Config) if part.name != "server"})


def _default(each: Field[Any]) -> Any:
    return field(default_factory=each.default_factory) if each.default_factory is not MISSING else each.default


def read_flags(path: str, known: Collection[str]) -> list[str]:
    """The settings of a YAML file as flags: `max-num-seqs: 8` (or with underscores) becomes `--max-num-seqs=8`. Raises
    ConfigError if the file cannot be read, or a key is none of `known`; the closest known one is suggested."""
    try:
        content = msgspec.yaml.decode(Path(path).read_bytes())
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {reason(error)}.", param="config") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}.", param="config") from error
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold 'name: value' lines.", param="config")
    return [flag for key, value in content.items() for flag in _flag(path, str(key), value, known)]


def _flag(path: str, key: str, value: Any, known: Collection[str]) -> list[str]:
    name = key.replace("-", "_")
    if name not in known:
        hint = did_you_mean(name, known).replace("_", "-")
        raise ConfigError(f"{path}: '{key}' is not a setting of this command.{hint}", param=name)
    flag = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}={value if isinstance(value, str) else json.dumps(value)}"]
