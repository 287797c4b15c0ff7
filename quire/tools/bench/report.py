"""Results: a summary of measured times, JSON with where, when and how it was measured, a table, and a progress bar."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from quire.errors import ConfigError, reason
from quire.tools.bench.system_info import system_info, versions

TABLE_WIDTH = 64
_SECRETS = ("api_key", "hf_token", "header")

Row = tuple[str, str]


def measured_with(*settings: Any) -> dict[str, Any]:
    """Date, machine, versions, and the settings (dataclasses) of a run with their secrets masked."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": system_info(),
        "versions": versions(),
        "settings": {name: value for each in settings for name, value in _plain(asdict(each)).items()},
    }


def write_json(path: str | Path, result: dict[str, Any], *, append: bool = False) -> None:
    """Write a result, or append it as one line to the file.

    Raises:
        ConfigError: The file cannot be written.
    """
    text = json.dumps(result, default=str, indent=None if append else 2)
    write_text(path, text + "\n", append=append)


def write_text(path: str | Path, text: str, *, append: bool = False) -> None:
    """Write a file, and make its directory.

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
    """Sections with a title each: names on the left, values on the right."""
    lines = [f" {title} ".center(TABLE_WIDTH, "=")]
    for heading, rows in sections:
        if heading:
            lines.append(heading.center(TABLE_WIDTH, "-"))
        lines += [f"{name:<40}{value:>{TABLE_WIDTH - 40}}" for name, value in rows]
    return "\n".join([*lines, "=" * TABLE_WIDTH])


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings flattened to field names, with secrets masked."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and name not in ("extra_body", "override_generation_config"):
            flat.update(_plain(value))
        elif name in _SECRETS and value:
            flat[name] = "set"
        else:
            flat[name] = str(value) if value == float("inf") else value
    return flat


@dataclass(frozen=True)
class Summary:
    """A summary of values in any unit; all zero if there are no values.

    Attributes:
        ci95: Half the width of the mean's 95% confidence interval (normal approximation).
        percentiles: Values by percentile.
    """

    mean: float
    median: float
    std: float
    ci95: float
    percentiles: dict[float, float]


def summarize(values: Sequence[float], percentiles: Sequence[float]) -> Summary:
    if not values:
        return Summary(0.0, 0.0, 0.0, 0.0, dict.fromkeys(percentiles, 0.0))
    ordered = sorted(values)
    std = pstdev(ordered)
    return Summary(
        mean=fmean(ordered),
        median=percentile(ordered, 50),
        std=std,
        ci95=1.96 * std / math.sqrt(len(ordered)),
        percentiles={wanted: percentile(ordered, wanted) for wanted in percentiles},
    )


def percentile(ordered: Sequence[float], wanted: float) -> float:
    """A percentile by linear interpolation between the closest ranks, as numpy's default.

    Args:
        ordered: Ascending, not empty.
        wanted: In 0..100.
    """
    position = (len(ordered) - 1) * wanted / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def percentile_name(wanted: float) -> str:
    """99 → `p99`, 99.9 → `p99.9`."""
    return f"p{wanted:g}"


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar for `total` things; call what is yielded after each."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
