"""docs/models.md, and the sweep that writes it, have every architecture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.models.families.registry import FAMILIES, POOLED
from tests.models_sweep.pooled_rows import POOLED_ROWS
from tests.models_sweep.rows import ROWS
from tests.models_sweep.table import GENERATING, POOLING, TABLES, Table, write

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_sweep_has_a_row_of_every_architecture() -> None:
    assert ROWS.keys() == FAMILIES.keys()
    assert POOLED_ROWS.keys() == POOLED.keys()


@pytest.mark.parametrize("table", TABLES, ids=["generating", "pooling"])
def test_the_page_has_a_line_of_every_architecture(table: Table) -> None:
    lines = PAGE.read_text().partition(table.begin)[2].partition(table.end)[0]
    named = re.findall(r"^\| `(\w+)`", lines, re.MULTILINE)
    assert named == sorted(table.families), "make test-models writes the page"


def test_architectures_that_were_not_run_keep_their_lines(tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    first = f"{GENERATING.begin}| `LlamaForCausalLM` | yes | kept |\n| `GoneForCausalLM` | yes |\n{GENERATING.end}"
    page.write_text(f"before\n{first}between\n{POOLING.begin}{POOLING.end}after\n")
    found = {"Qwen3ForCausalLM": {"test_logits": "failed", "test_tokens": "passed"}}
    write(page, found | {"BertModel": {"test_outputs": "passed"}})
    text = page.read_text()
    assert "| `LlamaForCausalLM` | yes | kept |" in text
    assert "| `Qwen3ForCausalLM` | yes | not run | differs | ✓ | not run |" in text
    assert "Gone" not in text
    assert "| `BertModel` | yes | ✓ | not run |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
