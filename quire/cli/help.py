"""`--help`, and `--help=WORD` for the flags of one group, or those that mention a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, get_type_hints

import tyro

from quire.cli.settings_fields import OWN_GROUP, Setting, settings_of
from quire.errors import ConfigError

HINT = "--config FILE.yaml reads flags from a file. --help=WORD shows a group ({groups}) or the flags about a word."


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
    """A dataclass with the settings of `options` in the group `word`, or else with those that mention it. Raises
    ConfigError if there are none."""
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
    default = setting.default
    if isinstance(default, Field) and default.default_factory is not MISSING:
        default = default.default_factory()
    hint = "" if default is None or default in ((), {}) else None
    shown = tyro.conf.arg(help=setting.description, help_behavior_hint=hint)
    return setting.name, Annotated[setting.kind, shown], setting.default
