"""Dashboards: made from panels.py, laid out without overlap, and asking for metrics that exist.

Grafana's types (test_grafana_schema.py) know nothing of places in the grid, queries and variables: these are looked at
here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs import metrics_table
from tests.deploy.promql import DASHBOARDS, DEPLOY, panels, shipped

SUFFIXES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def test_files_are_as_panels_py_makes_them() -> None:
    check = subprocess.run([sys.executable, DEPLOY / "grafana" / "make.py", "--check"], timeout=60)
    assert check.returncode == 0, "run python deploy/grafana/make.py"
    assert {path.stem for path in DASHBOARDS} == {"overview", "requests", "cache", "hardware"}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_has_what_grafana_needs(path: Path) -> None:
    board = json.loads(path.read_text())
    assert board["uid"] == f"quire-{path.stem}"
    assert len(board["uid"]) <= 40
    assert isinstance(board["schemaVersion"], int)
    assert {"title", "time", "templating", "annotations", "refresh"} <= board.keys()
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert names == ["datasource", "model", "instance"]
    assert [panel["id"] for panel in board["panels"]] == [*range(1, len(board["panels"]) + 1)]
    for panel in board["panels"]:
        assert panel["type"] in ("timeseries", "stat")
        assert panel["datasource"] == SOURCE
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs == sorted(set(refs))
        for target in panel["targets"]:
            assert target["datasource"] == SOURCE
            used = set(re.findall(r"\$(\w+)", target["expr"]))
            assert used <= {"__rate_interval", "model", "instance"}
            assert "instance" in used


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_lie_side_by_side(path: Path) -> None:
    cells: set[tuple[int, int]] = set()
    for panel in panels(path):
        place: dict[str, Any] = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not own & cells, panel["title"]
        cells |= own


def test_every_expression_asks_for_metrics_that_exist() -> None:
    series = {f.name + suffix for f in metrics_table.families() for suffix in SUFFIXES[f.type]}
    expressions = shipped()
    assert len(expressions) > 70
    for place, expression in expressions.items():
        asked = set(re.findall(r"(?<![\w:])(?:(?:vllm|quire):|http_|process_)\w+", expression))
        assert asked <= series, place
