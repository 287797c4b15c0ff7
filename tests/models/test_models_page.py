"""docs/models.md, and the sweep that writes it, have every architecture."""

from __future__ import annotations

import re
from pathlib import Path

from quire.models.families.registry import FAMILIES
from tests.models_sweep.rows import ROWS
from tests.models_sweep.table import BEGIN, END, write

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_sweep_has_a_row_of_every_architecture() -> None:
    assert ROWS.keys() == FAMILIES.keys()


def test_the_page_has_a_line_of_every_architecture() -> None:
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == sorted(FAMILIES), "make test-models writes the page"


def test_architectures_that_were_not_run_keep_their_lines(tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    page.write_text(f"before\n{BEGIN}| `LlamaForCausalLM` | yes | kept |\n| `GoneForCausalLM` | yes |\n{END}after\n")
    write(page, {"Qwen3ForCausalLM": {"test_logits": "failed", "test_tokens": "passed"}})
    text = page.read_text()
    assert "| `LlamaForCausalLM` | yes | kept |" in text
    assert "| `Qwen3ForCausalLM` | yes | not run | differs | ✓ | not run |" in text
    assert "Gone" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
