"""Predictions stay close to the measured rows, and the rows are those of docs/performance.md."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest

from quire.tools.sizing.measured_rows import CheckedRow, MeasuredRow, checked, measured_rows, step_arithmetic
from quire.tools.sizing.report import check_text

DOCS = Path(__file__).parents[2] / "docs" / "performance.md"
SECTIONS = {"Llama-3.1-8B": "llama-3.1-8b", "Qwen3-0.6B": "qwen3-0.6b", "Qwen3-30B-A3B": "qwen3-30b-a3b"}
NOT_TIMED = re.compile("start|checkpoint|sampled|40 lengths|touched")


def documented_rows() -> list[MeasuredRow]:
    text, rows = DOCS.read_text(), []
    for title, model in SECTIONS.items():
        section = text.split(f"\n### {title}\n")[1].split("\n### ")[0]
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            figure = re.fullmatch(r"([\d,.]+) (ms|s|tok/s)", cells[1]) if len(cells) > 2 else None
            name = re.sub(r" [¹²³⁴⁵‡†]+$", "", cells[0])
            if figure is not None and not NOT_TIMED.search(name):
                rows.append(MeasuredRow(model, name, float(figure[1].replace(",", "")), figure[2]))
    return rows


def test_the_rows_are_those_of_the_document() -> None:
    assert measured_rows() == documented_rows()
    assert len(measured_rows()) > 30


def assert_close(rows: list[CheckedRow]) -> None:
    errors = sorted(abs(row.error) for row in rows)
    assert median(errors) <= 0.10, check_text(rows)
    assert errors[-1] <= 0.20, check_text(rows)


def test_predicted_steps_are_close_to_measured_ones() -> None:
    rows = [row for row in measured_rows() if step_arithmetic(row.row) is not None]
    assert len(rows) > 15
    assert_close(checked(rows))


def test_a_simulated_load_is_close_to_the_measured_one() -> None:
    """The cheapest of the loads; the others are below."""
    rows = [row for row in measured_rows() if row.row.startswith("server, 32 clients")]
    assert len(rows) == 3
    assert_close(checked(rows))


@pytest.mark.long("engine")
def test_all_predictions_are_close() -> None:
    assert_close(checked(measured_rows()))
