"""Writes the tables in docs/migrating-from-vllm.md from the code: `python docs/migration_tables.py`.

With `--check` it only says whether they are as they should be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import Field
from pathlib import Path
from typing import Any

from quire.cli.settings_fields import Setting, settings_of
from quire.foundation.config import Config
from quire.foundation.config.vllm_compat import VLLM_REFUSED_VALUES, VLLM_SETTINGS, VLLM_VALUES, VllmSetting
from quire.import_paths import COMMANDS, NAMES
from quire.serving.api.schemas.known_fields import ELSEWHERE, IGNORED, UNSUPPORTED

PAGE = Path(__file__).with_name("migrating-from-vllm.md")
FLAGS = Path(__file__).with_name("vllm_flags.txt")
BEGIN, END = "<!-- {name}: made by docs/migration_tables.py -->\n", "<!-- end -->\n"


def flags() -> list[str]:
    """vLLM's flags, without dashes in front."""
    lines = FLAGS.read_text().splitlines()
    return [line for line in lines if line[0].isalpha()]


def flag(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def served() -> str:
    known = {name.replace("-", "_") for name in flags()}
    rows = sorted((each.name, shown_default(each)) for each in settings_of(Config) if each.name in known)
    return table(("flag", "default here"), ((flag(name), default) for name, default in rows))


def shown_default(setting: Setting) -> str:
    default = setting.default
    if isinstance(default, Field):
        default = default.default_factory()  # type: ignore[misc]  # a dict's, always
    _, _, said = setting.description.partition("Default: ")
    if default in (None, (), {}, ""):
        return said.rstrip(".") or "none"
    return f"`{json.dumps(default) if isinstance(default, bool) else default}`"


def neutral() -> str:
    """Groups of flags that are accepted, with the values that are, and why they have no effect."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, setting in VLLM_SETTINGS.items():
        values = neutral_values(setting)
        if values:
            groups.setdefault((setting.advice.removesuffix("; leave it out"), values), []).append(flag(name))
    return table(
        ("flag", "with", "why it has no effect"), ((join(names), v, why) for (why, v), names in groups.items())
    )


def neutral_values(setting: VllmSetting) -> str:
    if setting.is_always_neutral:
        return "any value"
    shown = [neutral.__doc__ if callable(neutral) else f"`{neutral}`" for neutral in setting.neutral if neutral != ""]
    return ", ".join(" ".join((each or "").split()).rstrip(".") for each in shown if each not in ("`None`", "`False`"))


def refused() -> str:
    """Groups of flags that are refused with any other value, with what to do."""
    groups: dict[str, list[str]] = {}
    for name, setting in VLLM_SETTINGS.items():
        if not setting.is_always_neutral:
            groups.setdefault(setting.advice, []).append(flag(name))
    for name, values in VLLM_REFUSED_VALUES.items():
        for value, advice in values.items():
            groups.setdefault(advice, []).append(f"`--{name.replace('_', '-')} {value}`")
    return table(("flag", "what to do"), ((join(names), advice) for advice, names in groups.items()))


def renamed_values() -> str:
    rows = (
        (f"{flag(name)} `{theirs}`", f"`{ours}`") for name, each in VLLM_VALUES.items() for theirs, ours in each.items()
    )
    return table(("value", "is read as"), rows)


def imports() -> str:
    rows = [(f"`{path}`", ", ".join(f"`{name}`" for name in names)) for path, names in NAMES.items() if names]
    return table(("module", "has"), rows)


def commands() -> str:
    return table(
        ("command", "is"), ((f"`python -m {path}`", f"`quire {' '.join(words)}`") for path, words in COMMANDS.items())
    )


def fields() -> str:
    rows = [("ignored", ", ".join(f"`{name}`" for name in sorted(IGNORED)))]
    rows.append(("refused, unless they ask for nothing", ", ".join(f"`{name}`" for name in sorted(UNSUPPORTED))))
    rows.append(("served by some endpoints", ", ".join(f"`{name}`" for name in sorted(ELSEWHERE))))
    return table(("these fields are", ""), rows)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines) + "\n"


def join(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


TABLES: Mapping[str, Any] = {
    "commands": commands, "imports": imports, "neutral": neutral, "served": served, "renamed": renamed_values,
    "refused": refused, "fields": fields,
}  # fmt: skip


def with_tables(page: str) -> str:
    """The page, with the tables as they should be."""
    for name, made in TABLES.items():
        begin = BEGIN.format(name=name)
        before, rest = page.split(begin)
        page = before + begin + made() + END + rest.partition(END)[2]
    return page


def main(arguments: list[str]) -> int:
    """0, or 1 if `--check` found other tables."""
    old = PAGE.read_text()
    new = with_tables(old)
    if "--check" in arguments:
        return int(old != new)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
