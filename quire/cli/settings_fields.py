"""The fields behind a command's flags: names, types, groups and descriptions, of a dataclass and those in it.

`--config file.yaml` has values for them, and `--help=WORD` shows those of one group, or those that mention a word.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec

from quire.errors import ConfigError, did_you_mean, reason
from quire.foundation.config import Config

OWN_GROUP = "options"
"""Group of the fields that belong to no part."""
HINT = "--config FILE.yaml reads flags from a file. --help=WORD shows a group ({groups}) or the flags about a word."


@dataclass(frozen=True)
class Setting:
    """One field: group, type with annotations for tyro, default as in `dataclasses.field`, and the dataclass
    that it is in."""

    name: str
    group: str
    kind: Any
    default: Any
    part: type

    @property
    def description(self) -> str:
        """The string below the field. Only help asks for it, and a start does not wait for reading sources."""
        return descriptions(self.part).get(self.name, "")


@cache
def settings_of(options: type) -> tuple[Setting, ...]:
    """All fields of `options`; a dataclass in it is replaced by its fields. Each step of parsing asks for them."""
    found: list[Setting] = []
    hints = get_type_hints(options, include_extras=True)
    for each in fields(options):
        kind = hints[each.name]
        if is_dataclass(kind):
            inner = settings_of(kind) if isinstance(kind, type) else ()
            found += [replace(setting, group=each.name) for setting in inner]
        else:
            found.append(Setting(each.name, OWN_GROUP, kind, _default(each), options))
    return tuple(found)


@cache
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
    return Config(**{part.name: getattr(settings, part.name) for part in fields(Config) if part.name != "server"})


def _default(each: Field[Any]) -> Any:
    return field(default_factory=each.default_factory) if each.default_factory is not MISSING else each.default


def read_flags(path: str, known: Collection[str]) -> list[str]:
    """The settings of a YAML file as flags: `max-num-seqs: 8` (or with underscores) becomes `--max-num-seqs=8`, and
    `no-x: true` means `x: false`. Raises ConfigError if the file cannot be read, or a key is none of `known`; the
    closest known one is suggested."""
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
    if name.startswith("no_") and name not in known and isinstance(value, bool):
        name, value = name[3:], not value
    if name not in known:
        hint = did_you_mean(name, known).replace("_", "-")
        raise ConfigError(f"{path}: '{key}' is not a setting of this command.{hint}", param=name)
    flag = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}={value if isinstance(value, str) else json.dumps(value)}"]


def joined_lists(options: type, arguments: Sequence[str]) -> list[str]:
    """Write a flag that takes several values, and is given several times, once with all of them."""
    several = {setting.name for setting in settings_of(options) if setting.kind == tuple[str, ...]}
    found: dict[str, list[str]] = {}
    kept: list[str] = []
    flag = ""
    for argument in arguments:
        if argument.startswith("-"):
            flag, equals, value = argument.partition("=")
            is_list = flag.removeprefix("--").replace("-", "_") in several
            flag = f"--{flag[2:].replace('_', '-')}" if is_list else ""
            if is_list:
                found.setdefault(flag, []).extend([value] if equals else [])
                flag = "" if equals else flag
                continue
        (found[flag] if flag else kept).append(argument)
    return [*kept, *(word for flag, values in found.items() for word in (flag, *values))]


def joined_keys(options: type, arguments: Sequence[str]) -> list[str]:
    """Write the keys of a JSON flag that are given one by one as one flag: `--x.a 1 --x.b.c d` becomes
    `--x={"a": 1, "b": {"c": "d"}}`. A value that is no JSON is a text."""
    whole = {setting.name for setting in settings_of(options) if "dict" in str(setting.kind)}
    found: dict[str, dict[str, Any]] = {}
    kept: list[str] = []
    left = deque(arguments)
    while left:
        argument = left.popleft()
        flag, equals, text = argument.partition("=")
        name, *keys = flag.removeprefix("--").split(".")
        name = name.replace("-", "_")
        if not flag.startswith("--") or not all(keys) or not keys or name not in whole:
            kept.append(argument)
            continue
        if not equals and not left:
            raise ConfigError(f"{flag} needs a value.", param=name)
        place = found.setdefault(name, {})
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{flag}: {key} has a value already.", param=name)
        place[keys[-1]] = _json_or_text(text if equals else left.popleft())
    return [*kept, *(f"--{name.replace('_', '-')}={json.dumps(value)}" for name, value in found.items())]


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def help_word(arguments: Sequence[str]) -> str | None:
    """The help that is asked for: `all`, a group or another word; None if no help is."""
    for argument in arguments:
        if argument in ("-h", "--help"):
            return "all"
        if argument.startswith("--help="):
            return argument.removeprefix("--help=").lower()
    return None


def hint(options: type) -> str:
    return HINT.format(groups=", ".join(dict.fromkeys(setting.group for setting in settings_of(options))))


def described(options: type) -> type:
    """A dataclass like `options`, without defaults that would say nothing in the help."""
    hints = get_type_hints(options, include_extras=True)
    settings = {setting.name: setting for setting in settings_of(options) if setting.group == OWN_GROUP}
    columns = []
    for each in fields(options):
        kind: Any = hints[each.name]
        if is_dataclass(kind):
            part = described(kind)  # type: ignore[arg-type]  # a type, not an instance of one
            columns.append((each.name, part, field(default_factory=part)))
        else:
            columns.append(_column(settings[each.name]))
    made = make_dataclass(options.__name__, columns)
    made.__doc__ = options.__doc__
    return made


def about(options: type, word: str) -> type:
    """A dataclass with the settings of the group `word`, or else those that mention it. Raises ConfigError without
    any."""
    settings = settings_of(options)
    found = [setting for setting in settings if setting.group == word]
    found = found or [setting for setting in settings if _speaks_of(setting, word)]
    if not found:
        groups = ", ".join(dict.fromkeys(setting.group for setting in settings))
        raise ConfigError(f"No flag is about '{word}'. Groups: {groups}.")
    parts = []
    for group in dict.fromkeys(setting.group for setting in found):
        part: Any = make_dataclass(group, [_column(setting) for setting in found if setting.group == group])
        part.__doc__ = f"Settings of the group {group}."
        parts.append((group, part, field(default_factory=part)))
    return make_dataclass("Found", parts)


def _speaks_of(setting: Setting, word: str) -> bool:
    return word.replace("_", "-").strip("-") in f"{setting.name.replace('_', '-')} {setting.description}".lower()


def _column(setting: Setting) -> tuple[str, Any, Any]:
    """A field for tyro. If the default is None or empty, the description says what it means, and help hides it."""
    import tyro

    default = setting.default
    if isinstance(default, Field) and default.default_factory is not MISSING:
        default = default.default_factory()
    hint = "" if default is None or default in ((), {}) else None
    shown = tyro.conf.arg(help=setting.description, help_behavior_hint=hint)
    return setting.name, Annotated[setting.kind, shown], setting.default
