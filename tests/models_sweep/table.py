"""The tables of docs/models.md: each architecture, and what `make test-models` found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.models.families.family import Family
from quire.models.families.registry import FAMILIES, POOLED

_WORDS = {"passed": "✓", "failed": "differs", "skipped": "–"}
_NOT_RUN = "not run"


@dataclass(frozen=True)
class Table:
    """A table between two lines of the page.

    Attributes:
        checks: Its columns, by the names of the tests.
        families: Its rows.
        begin, end: The lines.
    """

    checks: Mapping[str, str]
    families: Mapping[str, Family]
    begin: str
    end: str = "<!-- end -->\n"

    def write(self, text: str, found: Mapping[str, Mapping[str, str]]) -> str:
        """The page's text with what was found; architectures that were not run keep their lines."""
        before, rest = text.split(self.begin)
        inner, after = rest.split(self.end, 1)
        names = sorted(self.families)
        lines = [self._line(name, found[name]) if name in found else self.old_line(inner, name) for name in names]
        head = ["| architecture | fp16 | " + " | ".join(self.checks.values()) + " |"]
        head += ["|---" * (2 + len(self.checks)) + "|"]
        return before + self.begin + "\n".join([*head, *lines]) + "\n" + self.end + after

    def old_line(self, table: str, name: str) -> str:
        """The architecture's line in a table, or one that says that it was not run."""
        begin = f"| `{name}` |"
        return next((line for line in table.splitlines() if line.startswith(begin)), self._line(name, {}))

    def _line(self, name: str, outcomes: Mapping[str, str]) -> str:
        half = "no" if self.families[name].overflows_float16 else "yes"
        cells = (_WORDS[outcomes[check]] if check in outcomes else _NOT_RUN for check in self.checks)
        return f"| `{name}` | {half} | {' | '.join(cells)} |"


GENERATING = Table(
    {
        "test_weights_are_counted": "weights",
        "test_logits": "logits",
        "test_tokens": "tokens",
        "test_divided": "two ranks",
    },
    FAMILIES,
    "<!-- made by make test-models -->\n",
)
POOLING = Table(
    {"test_outputs": "outputs", "test_pooled_divided": "two ranks"},
    POOLED,
    "<!-- of texts, made by make test-models -->\n",
)
TABLES = (GENERATING, POOLING)
CHECKS = {**GENERATING.checks, **POOLING.checks}
"""All columns, by the names of the tests."""


def write(page: Path, found: Mapping[str, Mapping[str, str]]) -> None:
    """Write what was found to the page's tables."""
    text = page.read_text()
    for table in TABLES:
        text = table.write(text, found)
    page.write_text(text)
