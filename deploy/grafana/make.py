"""Writes Grafana's dashboards from panels.py: `python deploy/grafana/make.py`; with `--check` it only compares.

Made for Grafana 10 and newer. A viewer chooses the data source, the model and the servers.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from panels import DASHBOARDS, Panel

PLACE = Path(__file__).with_name("dashboards")
COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SHORT = {
    "w": 'model_name=~"$model",instance=~"$instance"',
    "i": 'instance=~"$instance"',
    "r": "$__rate_interval",
}


def promql(query: str) -> str:
    """A panel's query with Grafana's variables."""
    return re.sub(r"\$([wir])\b", lambda match: SHORT[match[1]], query)


def variable(name: str, label: str, metric: str) -> dict[str, Any]:
    """A choice among a label's values."""
    query = f"label_values({metric}, {name if name == 'instance' else 'model_name'})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def panel_json(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """One panel."""
    targets = [
        {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": promql(query), "legendFormat": legend or "__auto"}
        for i, (legend, query) in enumerate(panel.queries.items())
    ]
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
    options: dict[str, Any] = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "graphMode": "area"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": options,
        "targets": targets,
    }


def placed(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Panels from left to right, in rows of equal height."""
    found, x, y, height = [], 0, 0, 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > COLUMNS or (height and panel.height != height):
            x, y = 0, y + height
        height = panel.height
        found.append(panel_json(panel, number, x, y))
        x += panel.width
    return found


def dashboard(name: str, title: str, panels: Sequence[Panel]) -> dict[str, Any]:
    """A whole dashboard."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1}
    links = {
        "tooltip": "",
        "type": "dashboards",
        "title": "Quire",
        "tags": ["quire"],
        "asDropdown": True,
        "keepTime": True,
    }
    return {
        "uid": f"quire-{name}",
        "title": title,
        "tags": ["quire"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [{**links, "includeVars": True, "targetBlank": False, "icon": "external link", "url": ""}],
        "templating": {
            "list": [
                source,
                variable("model", "Model", "vllm:num_requests_running"),
                variable("instance", "Server", "vllm:num_requests_running"),
            ]
        },
        "annotations": {"list": []},
        "panels": placed(panels),
    }


def main(arguments: list[str]) -> int:
    """0, or 1 if `--check` found other files."""
    different = 0
    for name, (title, panels) in DASHBOARDS.items():
        text = json.dumps(dashboard(name, title, panels), indent=1, ensure_ascii=False) + "\n"
        path = PLACE / f"{name}.json"
        if "--check" not in arguments:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            different = 1
    return different


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
