"""Results as files and as lines: JSON with where, when and how it was measured, and a table for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, reason
from quire.tools.bench.system_info import system_info, versions

TABLE_WIDTH = 64
_SECRETS = ("api_key", "hf_token", "header")

Row = tuple[str, str]


def measured_with(*settings: Any) -> dict[str, Any]:
    """Date, machine, versions, and the settings (dataclasses) of a run without their secrets."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": system_info(),
        "versions": versions(),
        "settings": {name: value for each in settings for name, value in _plain(asdict(each)).items()},
    }


def write_json(path: str | Path, result: dict[str, Any], *, append: bool = False) -> None:
    """Write a result, or add it as one line to what the file holds.

    Raises:
        ConfigError: The file cannot be written.
    """
    text = json.dumps(result, default=str, indent=None if append else 2)
    write_text(path, text + "\n", append=append)


def write_text(path: str | Path, text: str, *, append: bool = False) -> None:
    """Write a file, making its directory.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a" if append else "w") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"The result cannot be written to {path}: {reason(error)}.") from error


def table(title: str, sections: Sequence[tuple[str, Sequence[Row]]]) -> str:
    """Names left, values right, a titled section each."""
    lines = [f" {title} ".center(TABLE_WIDTH, "=")]
    for heading, rows in sections:
        if heading:
            lines.append(heading.center(TABLE_WIDTH, "-"))
        lines += [f"{name:<40}{value:>{TABLE_WIDTH - 40}}" for name, value in rows]
    return "\n".join([*lines, "=" * TABLE_WIDTH])


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings flattened to field names, secrets masked."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and name not in ("extra_body", "override_generation_config"):
            flat.update(_plain(value))
        elif name in _SECRETS and value:
            flat[name] = "set"
        else:
            flat[name] = str(value) if value == float("inf") else value
    return flat
