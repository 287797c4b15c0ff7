"""Results: a summary of measured times, JSON with where, when and how they were measured, a table, a progress bar, and
line charts as one self-contained SVG file.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from html import escape
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
WIDTH, HEIGHT = 820, 260
LEFT, RIGHT, TOP, BOTTOM = 84, 20, 36, 46
COLORS = ("#1f5fbf", "#d1495b", "#2e8b57", "#8a5cc2", "#c77d1e")
TICKS = 6
PLOT_BUCKETS = 60
"""Number of equal parts of a run in which rates are drawn."""
CHARACTER = 7.5
"""Approximate width of a letter of the legend."""
FONT = "font-family='system-ui, sans-serif'"


def measured_with(*settings: Any) -> dict[str, Any]:
    """Date, machine, versions, and the settings (dataclasses) of a run with their secrets masked."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": system_info(),
        "versions": versions(),
        "settings": {name: value for each in settings for name, value in _plain(asdict(each)).items()},
    }


def write_json(path: str | Path, result: dict[str, Any], *, append: bool = False) -> None:
    """Write a result, or append it as one line to the file. Raises ConfigError if the file cannot be written."""
    text = json.dumps(result, default=str, indent=None if append else 2)
    write_text(path, text + "\n", append=append)


def write_text(path: str | Path, text: str, *, append: bool = False) -> None:
    """Write a file, and make its directory. Raises ConfigError if it cannot be written."""
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
    """A summary of values, all zero without any. `ci95` is half the mean's 95% confidence interval, as for a normal
    distribution."""

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
    """The percentile `wanted`, 0 to 100, of ascending values, by linear interpolation as numpy's default."""
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


@dataclass(frozen=True)
class Line:
    """A named line; with `steps`, each value holds until the next."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    steps: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]


def shares_line(name: str, values: Iterable[float]) -> Line:
    """The line that shows, for each value, the percentage of values up to it."""
    ordered = sorted(values)
    shares = [100 * (rank + 1) / len(ordered) for rank in range(len(ordered))]
    return Line(name, [0.0, *ordered], [0.0, *shares])


def rates(amounts: Iterable[tuple[float, float]], seconds: float, buckets: int) -> tuple[list[float], list[float]]:
    """Amounts a second in equal parts of a time: the parts' edges (seconds), and the rate after each edge. Each amount
    comes with its seconds after the beginning."""
    width, sums = (seconds or 1.0) / buckets, [0.0] * buckets
    for at, amount in amounts:
        sums[min(int(at / width), buckets - 1)] += amount
    found = [amount / width for amount in sums]
    return [number * width for number in range(buckets + 1)], [*found, found[-1]]


def svg(panels: Sequence[Panel]) -> str:
    body = "\n".join(_panel(panel, number * HEIGHT) for number, panel in enumerate(panels))
    height = HEIGHT * len(panels)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}'>\n"
        f"<rect width='{WIDTH}' height='{height}' fill='white'/>\n{body}\n</svg>\n"
    )


def ticks(highest: float) -> list[float]:
    """Round numbers from 0 to the first that reaches `highest`: multiples of 1, 2 or 5 times a power of ten."""
    if highest <= 0:
        return [0.0, 1.0]
    rough = highest / (TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [round(step * number, 12) for number in range(math.ceil(highest / step - 1e-9) + 1)]


def _panel(panel: Panel, top: int) -> str:
    x_ticks = ticks(max((x for line in panel.lines for x in line.xs), default=0.0))
    y_ticks = ticks(max((y for line in panel.lines for y in line.ys), default=0.0))
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x_at(value: float) -> float:
        return LEFT + wide * value / x_ticks[-1]

    def y_at(value: float) -> float:
        return top + TOP + high * (1 - value / y_ticks[-1])

    parts = [_text(LEFT, top + 22, panel.title, "start", 15, "bold")]
    for tick in y_ticks:
        parts.append(f"<path d='M{LEFT} {y_at(tick):.1f}H{WIDTH - RIGHT}' stroke='#ddd'/>")
        parts.append(_text(LEFT - 8, y_at(tick) + 4, f"{tick:,.10g}", "end"))
    for tick in x_ticks:
        parts.append(f"<path d='M{x_at(tick):.1f} {y_at(0):.1f}v5' stroke='#444'/>")
        parts.append(_text(x_at(tick), y_at(0) + 18, f"{tick:,.10g}", "middle"))
    parts.append(f"<path d='M{LEFT} {y_at(0):.1f}H{WIDTH - RIGHT}' stroke='#444'/>")
    parts.append(_text(LEFT + wide / 2, y_at(0) + 36, panel.x_label, "middle"))
    middle = top + TOP + high / 2
    parts.append(f"<g transform='rotate(-90 16 {middle:.1f})'>{_text(16, middle, panel.y_label, 'middle')}</g>")
    legend = float(WIDTH - RIGHT)
    for number, line in enumerate(panel.lines):
        color = COLORS[number % len(COLORS)]
        points = [(x_at(x), y_at(y)) for x, y in zip(line.xs, line.ys, strict=True)]
        parts.append(f"<path d='{_path(points, line.steps)}' fill='none' stroke='{color}' stroke-width='1.8'/>")
        parts.append(_text(legend, top + 22, line.name, "end", 12, "bold", color))
        legend -= CHARACTER * len(line.name) + 16
    return "\n".join(parts)


def _path(points: Sequence[tuple[float, float]], steps: bool) -> str:
    if not points:
        return "M0 0"
    (x, y), *rest = points
    return f"M{x:.1f} {y:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" if steps else f"L{x:.1f} {y:.1f}" for x, y in rest)


def _text(
    x: float, y: float, text: str, anchor: str, size: int = 12, weight: str = "normal", color: str = "#222"
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-size='{size}' font-weight='{weight}' "
        f"fill='{color}' {FONT}>{escape(text)}</text>"
    )
