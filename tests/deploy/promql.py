"""Every PromQL expression that is shipped or documented, and the guides': as a server without Grafana takes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
GUIDE_ALERTS = """
groups:
  - name: vllm_alerts
    rules:
      - alert: HighKVCacheUsage
        expr: vllm_gpu_cache_usage_perc > 0.95
        for: 5m
        labels:
          severity: warning
        annotations:
          summary: 'KV Cache usage exceeds 95%'

      - alert: HighRequestLatency
        expr: histogram_quantile(0.99, vllm_e2e_request_latency_seconds_bucket) > 30
        for: 5m
        labels:
          severity: critical
        annotations:
          summary: 'P99 request latency exceeds 30 seconds'

      - alert: HighQueueDepth
        expr: vllm_num_requests_waiting > 100
        for: 2m
        labels:
          severity: warning
        annotations:
          summary: 'Waiting requests exceed 100'
"""
"""As the guides have them, to the letter."""
_VARIABLES = {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*"}
_THRESHOLD = re.compile(r" [<>=!]=? [\d.]+(?=$| and )")


def without_variables(query: str) -> str:
    """A panel's query with everything chosen."""
    for name, value in _VARIABLES.items():
        query = query.replace(name, value)
    return query


def without_thresholds(expression: str) -> str:
    """What an alert looks at, whatever it is: `a > 5` gives `a`."""
    return _THRESHOLD.sub("", expression)


def panels(path: Path) -> list[dict[str, Any]]:
    """A dashboard's."""
    return list(json.loads(path.read_text())["panels"])


def rules(path: Path) -> list[dict[str, Any]]:
    """Of a file of rules."""
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def shipped() -> dict[str, str]:
    """Expressions by where they stand; alerts without their thresholds."""
    found = {}
    for path in DASHBOARDS:
        for panel in panels(path):
            for target in panel["targets"]:
                found[f"{path.stem}: {panel['title']} {target['refId']}"] = without_variables(target["expr"])
    for name in ("recording", "alerts", "guide-names"):
        for rule in rules(DEPLOY / "prometheus" / f"{name}.yml"):
            found[f"{name}: {rule.get('alert') or rule['record']}"] = without_thresholds(rule["expr"])
    for rule in yaml.safe_load(GUIDE_ALERTS)["groups"][0]["rules"]:
        found[f"guides: {rule['alert']}"] = without_thresholds(rule["expr"])
    adapter = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter.yaml").read_text())
    for rule in adapter["rules"]["custom"]:
        query = rule["metricsQuery"].replace("<<.GroupBy>>", "instance").replace("<<.LabelMatchers>>", 'job!=""')
        found[f"adapter: {rule['name']['as']}"] = query
    documents = "\n".join((ROOT / "docs" / name).read_text() for name in ("metrics.md",))
    for block in re.findall(r"```promql\n(.*?)```", documents, re.S):
        found |= {f"docs: {line}": without_thresholds(line) for line in block.splitlines()}
    return found
