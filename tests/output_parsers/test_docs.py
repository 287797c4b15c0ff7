"""docs/tools.md names every parser."""

from __future__ import annotations

import re
from pathlib import Path

from quire.text.output_parsers.registry import REASONING_PARSERS, TOOL_PARSERS

FORMATS = (Path(__file__).parents[2] / "docs/tools.md").read_text().partition("## Formats")[2]


def test_every_tool_parser_has_a_row_and_no_other() -> None:
    rows = [line.split("|")[1] for line in FORMATS.splitlines() if line.startswith("| `") and "--" not in line]
    assert sorted(re.findall("`(.+?)`", "".join(rows))) == sorted(TOOL_PARSERS)


def test_every_reasoning_parser_is_named_and_no_other() -> None:
    line = next(line for line in FORMATS.splitlines() if line.startswith("Reasoning parsers:"))
    assert sorted(re.findall("`(.+?)`", line)) == sorted(REASONING_PARSERS)
