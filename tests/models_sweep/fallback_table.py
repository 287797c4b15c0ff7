"""The tables of docs/fallback.md and, of images, docs/models.md: model types, and what `make test-models` found."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

BEGIN, END = "<!-- made by make test-models -->\n", "<!-- end -->\n"
IMAGES = "<!-- images, made by make test-models -->\n", "<!-- end of images -->\n"
_WORDS = {"paged": "right, paged", "own": "right, own cache"}
_ROW = re.compile(r"\| `([^`]+)` \| `[^`]+` \| ([^|]+) \|")
_HEAD = ("| model type | class | outcome | why |", "|---|---|---|---|")
_LONGEST = 160

Found = Mapping[str, tuple[str, str, str]]
"""By model type: its class, the outcome, and the reason."""


def write_images(page: Path, found: Found) -> None:
    """Write what was found of images to the page; model types that were not run keep their lines."""
    before, rows, after = _kept(page, found, *IMAGES)
    counts = Counter(match[2] for line in rows.values() if (match := _ROW.match(line)))
    listed = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items(), key=lambda each: -each[1]))
    lines = [
        f"transformers {_version()}: {len(rows)} model types that read images, {listed}.", "", *_HEAD,
        *(rows[name] for name in sorted(rows)),
    ]  # fmt: skip
    page.write_text(before + IMAGES[0] + "\n".join(lines) + "\n" + IMAGES[1] + after)


def _kept(page: Path, found: Found, begin: str, end: str) -> tuple[str, dict[str, str], str]:
    """Return the page before a table, the table's lines by model type with what was found, and the page behind it."""
    before, rest = page.read_text().split(begin)
    inner, after = rest.split(end)
    rows = {match[1]: line for line in inner.splitlines() if (match := _ROW.match(line))}
    return before, rows | {name: _line(name, *outcome) for name, outcome in found.items()}, after


def write(page: Path, found: Found) -> None:
    """Write what was found to the page; model types that were not run keep their lines."""
    before, rows, after = _kept(page, found, BEGIN, END)
    counts = Counter(match[2] for line in rows.values() if (match := _ROW.match(line)))
    paged, own = (counts.pop(word, 0) for word in _WORDS.values())
    others = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    lines = [
        f"transformers {_version()}: {len(rows)} model types, {paged + own} right ({paged} paged, {own} "
        f"with a cache of their own), {others}.",
        "",
        *_HEAD,
        *(rows[name] for name in sorted(rows)),
    ]
    page.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


def _line(name: str, architecture: str, outcome: str, reason: str) -> str:
    why = reason.replace("|", "\\|")
    why = why if len(why) <= _LONGEST else f"{why[:_LONGEST]} …"
    return f"| `{name}` | `{architecture}` | {_WORDS.get(outcome, outcome)} | {why} |"


def _version() -> str:
    import transformers

    return str(transformers.__version__)
