"""The table of docs/models.md: each architecture, and what `make test-models` found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quire.models.families.registry import FAMILIES

CHECKS = {
    "test_weights_are_counted": "weights",
    "test_logits": "logits",
    "test_tokens": "tokens",
    "test_divided": "two ranks",
}
"""The table's columns, by the names of the tests."""
BEGIN, END = "<!-- made by make test-models -->\n", "<!-- end -->\n"
_WORDS = {"passed": "✓", "failed": "differs", "skipped": "–"}
_NOT_RUN = "not run"


def write(page: Path, found: Mapping[str, Mapping[str, str]]) -> None:
    """Write what was found to the page; architectures that were not run keep their lines."""
    text = page.read_text()
    before, rest = text.split(BEGIN)
    inner, after = rest.split(END)
    lines = {name: _line(name, found[name]) if name in found else old_line(inner, name) for name in sorted(FAMILIES)}
    head = ["| architecture | fp16 | " + " | ".join(CHECKS.values()) + " |", "|---" * (2 + len(CHECKS)) + "|"]
    page.write_text(before + BEGIN + "\n".join([*head, *lines.values()]) + "\n" + END + after)


def old_line(table: str, name: str) -> str:
    """The architecture's line in a table, or one that says that it was not run."""
    begin = f"| `{name}` |"
    return next((line for line in table.splitlines() if line.startswith(begin)), _line(name, {}))


def _line(name: str, outcomes: Mapping[str, str]) -> str:
    half = "no" if FAMILIES[name].overflows_float16 else "yes"
    cells = (_WORDS[outcomes[check]] if check in outcomes else _NOT_RUN for check in CHECKS)
    return f"| `{name}` | {half} | {' | '.join(cells)} |"
