"""`quire bench regress`: whether newer figures are worse than older ones, beyond the noise of their runs.

Reads files of `benchmarks/h200/targets.py --out` and of `quire bench kernels --json`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from quire.errors import ConfigError, reason

STANDARD_INPUT = "-"
_MAD_TO_STD = 1.4826
"""The standard deviation of a normal distribution, divided by its median absolute deviation."""
_NOISE_STDS = 2.0

Key = tuple[str, str]


@dataclass(frozen=True)
class RegressOptions:
    """Which files are compared."""

    DESCRIPTION: ClassVar[str] = (
        "Compare the figures of two files, or of several runs each; exit code 1 if any got worse."
    )

    against: tuple[str, ...]
    """Files of the older figures. Several are runs of the same."""
    new: tuple[str, ...] = (STANDARD_INPUT,)
    """Files of the newer figures. Default: standard input."""
    max_loss: float = 0.03
    """The share by which a figure may be worse, beside its noise."""


@dataclass(frozen=True)
class Figure:
    """One measured quantity: the values of its runs, and the figure that each file states, which need not be the median
    of the runs. Tokens a second are better when higher, and times are not."""

    values: tuple[float, ...]
    higher_is_better: bool
    stated: tuple[float, ...]

    @property
    def value(self) -> float:
        """The median of the figures that the files state."""
        return statistics.median(self.stated)

    @property
    def noise(self) -> float:
        """How far the runs scatter, as a share of the figure; 0 for a single run. These are two standard deviations,
        from the median absolute deviation, which one odd run does not move."""
        middle = statistics.median(self.values)
        deviation = statistics.median(abs(value - middle) for value in self.values)
        return _NOISE_STDS * _MAD_TO_STD * deviation / abs(middle) if middle else 0.0


@dataclass(frozen=True)
class Comparison:
    """An older figure and a newer one of the same row."""

    key: Key
    old: Figure
    new: Figure

    @property
    def loss(self) -> float:
        """The share by which the newer figure is worse; negative if it is better."""
        if self.new.higher_is_better:
            return 1 - self.new.value / self.old.value
        return self.new.value / self.old.value - 1

    @property
    def noise(self) -> float:
        """The noise of both figures together."""
        return float((self.old.noise**2 + self.new.noise**2) ** 0.5)

    def is_regression(self, max_loss: float) -> bool:
        """Whether the loss exceeds what is allowed and the noise."""
        return self.loss > max_loss + self.noise


def run(options: RegressOptions) -> int:
    """Compare and report; returns the exit code: 1 if something got worse. Raises ConfigError if a file cannot be read,
    or the sides have different cards or no row in common."""
    if options.max_loss < 0:
        raise ConfigError(f"--max-loss must not be negative, got {options.max_loss}.", param="max_loss")
    older, newer = ([_read(file) for file in files] for files in (options.against, options.new))
    _check_same_card([*older, *newer])
    old, new = _figures(older), _figures(newer)
    found = [Comparison(key, figure, new[key]) for key, figure in old.items() if key in new]
    if not found:
        raise ConfigError("The two sides have no row in common: compare files of the same benchmark.")
    worse = [comparison for comparison in found if comparison.is_regression(options.max_loss)]
    print("\n".join([_HEADING, *(_line(comparison, comparison in worse) for comparison in found)]))
    if missing := [" ".join(key).strip() for key in old if key not in new]:
        print(f"Not measured again: {', '.join(missing)}")
    print(f"{len(found)} compared, {len(worse)} worse by more than {options.max_loss:.0%} beyond noise")
    return 1 if worse else 0


def _check_same_card(results: Sequence[dict[str, Any]]) -> None:
    cards = {", ".join(gpu.get("name", "?") for gpu in result["machine"]["gpus"]) or "no GPU" for result in results}
    if len(cards) > 1:
        raise ConfigError(
            f"The files were measured on different cards and cannot be compared: {'; '.join(sorted(cards))}."
        )


def _figures(results: Sequence[dict[str, Any]]) -> dict[Key, Figure]:
    merged: dict[Key, Figure] = {}
    for result in results:
        for key, figure in _rows(result):
            if (known := merged.get(key)) is not None:
                figure = Figure(known.values + figure.values, figure.higher_is_better, known.stated + figure.stated)
            merged[key] = figure
    return merged


def _read(file: str) -> dict[str, Any]:
    try:
        text = sys.stdin.read() if file == STANDARD_INPUT else Path(file).read_text(encoding="utf-8")
        result = json.loads(text)
        if isinstance(result, dict) and "machine" in result and result.keys() & {"rows", "cases"}:
            return result
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a result ({reason(error)}).") from error
    raise ConfigError(f"{file} holds no rows: it must be the file of targets.py --out or quire bench kernels --json.")


def _rows(result: dict[str, Any]) -> Iterator[tuple[Key, Figure]]:
    for row in result.get("rows", []):
        higher = row["better"] == "higher"
        yield (row["model"], row["row"]), Figure(tuple(row["runs"]), higher, (row["value"],))
    for case in result.get("cases", []):
        yield (case["op"], case["name"]), Figure((case["seconds"],), False, (case["seconds"],))


_HEADING = f"{'row':<66}{'before':>11}{'now':>11}{'change':>9}{'noise':>8}"


def _line(comparison: Comparison, is_worse: bool) -> str:
    old, new = comparison.old.value, comparison.new.value
    line = f"{' '.join(comparison.key):<66}{old:>11.5g}{new:>11.5g}{new / old - 1:>+9.1%}{comparison.noise:>8.1%}"
    return f"{line}  WORSE" if is_worse else line
