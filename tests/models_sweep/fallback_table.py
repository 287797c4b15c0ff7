"""The table of docs/fallback.md: each model type of transformers, and what `make test-models` found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

BEGIN, END = "<!-- made by make test-models -->\n", "<!-- end -->\n"
_WORDS = {"paged": "right, paged", "own": "right, own cache"}
_LONGEST = 160

Found = Mapping[str, tuple[str, str, str]]
"""By model type: its class, the outcome, and the reason."""


def write(page: Path, found: Found) -> None:
    """Write what was found, all of it, to the page."""
    before, rest = page.read_text().split(BEGIN)
    after = rest.split(END)[1]
    counts = Counter(outcome for _, outcome, _ in found.values())
    right = counts["paged"] + counts["own"]
    others = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()) if outcome not in _WORDS)
    lines = [
        f"transformers {_version()}: {len(found)} model types, {right} right ({counts['paged']} paged, {counts['own']} "
        f"with a cache of their own), {others}.",
        "",
        "| model type | class | outcome | why |",
        "|---|---|---|---|",
        *(_line(name, *found[name]) for name in sorted(found)),
    ]
    page.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


def _line(name: str, architecture: str, outcome: str, reason: str) -> str:
    why = reason.replace("|", "\\|")
    why = why if len(why) <= _LONGEST else f"{why[:_LONGEST]} …"
    return f"| `{name}` | `{architecture}` | {_WORDS.get(outcome, outcome)} | {why} |"


def _version() -> str:
    import transformers

    return str(transformers.__version__)
