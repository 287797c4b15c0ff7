"""Prometheus' own tool on the rules: they parse, and fire when they should."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.promql import DEPLOY, GUIDE_ALERTS, ROOT, rules

PROMETHEUS = DEPLOY / "prometheus"
FILES = ("recording.yml", "alerts.yml", "guide-names.yml")


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Its answer; the test is skipped where it is not installed."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    return subprocess.run([program, *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60)


def test_rules_and_configuration_are_valid(tmp_path: Path) -> None:
    guides = tmp_path / "guides.yml"
    guides.write_text(GUIDE_ALERTS)
    for arguments in (("check", "rules", *FILES, guides), ("check", "config", "prometheus.yml")):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_should_and_only_then() -> None:
    done = promtool("test", "rules", "alerts.test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tried_and_documented() -> None:
    tried = set(re.findall(r"alertname: (\w+)", (PROMETHEUS / "alerts.test.yml").read_text()))
    alerts = {rule["alert"] for rule in rules(PROMETHEUS / "alerts.yml")}
    assert tried == alerts
    documented = set(re.findall(r"^\| `(Quire\w+)`", (ROOT / "docs" / "operating.md").read_text(), re.M))
    assert documented == alerts
