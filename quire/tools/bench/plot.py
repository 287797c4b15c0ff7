"""Line charts as one self-contained SVG file: panels below each other, with axes that can be read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 820, 260
LEFT, RIGHT, TOP, BOTTOM = 84, 20, 36, 46
COLORS = ("#1f5fbf", "#d1495b", "#2e8b57", "#8a5cc2", "#c77d1e")
TICKS = 6
PLOT_BUCKETS = 60
"""Number of equal parts of a run in which rates are drawn."""
CHARACTER = 7.5
"""Approximate width of a letter of the legend."""
FONT = "font-family='system-ui, sans-serif'"


@dataclass(frozen=True)
class Line:
    """A named line; with `steps`, each value holds until the next."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    steps: bool = False


@dataclass(frozen=True)
class Panel:
    """One chart."""

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
    """Amounts a second in equal parts of a time: the parts' edges (seconds), and the rate after each edge.

    Args:
        amounts: Seconds after the beginning, and the amount.
        seconds: Length of the whole time.
    """
    width, sums = (seconds or 1.0) / buckets, [0.0] * buckets
    for at, amount in amounts:
        sums[min(int(at / width), buckets - 1)] += amount
    found = [amount / width for amount in sums]
    return [number * width for number in range(buckets + 1)], [*found, found[-1]]


def svg(panels: Sequence[Panel]) -> str:
    """The text of an SVG file with these panels."""
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
