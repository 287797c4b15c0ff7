"""`--help=WORD`: only the flags of one group, or those that speak of something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, make_dataclass
from typing import Annotated, Any

import tyro

from quire.cli.fields import Setting, settings_of
from quire.errors import ConfigError

HINT = "--config FILE.yaml reads flags from a file. --help=WORD shows a group ({groups}) or the flags about a word."


def help_word(arguments: Sequence[str]) -> str | None:
    """What help is asked for: `all`, a group or another word; None when no help is."""
    for argument in arguments:
        if argument in ("-h", "--help"):
            return "all"
        if argument.startswith("--help="):
            return argument.removeprefix("--help=").lower()
    return None


def hint(options: type) -> str:
    """Ends a command's description."""
    return HINT.format(groups=", ".join(dict.fromkeys(setting.group for setting in settings_of(options))))


def about(options: type, word: str) -> type:
    """A dataclass with those settings of `options` that are of the group `word` or else speak of it.

    Raises:
        ConfigError: None does.
    """
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
    return setting.name, Annotated[setting.kind, tyro.conf.arg(help=setting.description)], setting.default
