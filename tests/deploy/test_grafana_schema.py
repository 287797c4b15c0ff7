"""Grafana's own types of dashboards, which it publishes for TypeScript, judge those that are shipped."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.promql import DASHBOARDS

pytestmark = pytest.mark.long("operations")
PACKAGES = Path(__file__).with_name("grafana") / "package.json"
TYPES = "./node_modules/@grafana/schema/dist/esm/raw/dashboard/x/dashboard_types.gen"
INSTALL = ("install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent")
CHECK = ("--noEmit", "--strict", "--skipLibCheck", "--moduleResolution", "bundler", "--module", "esnext")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the compiler and the types."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    directory = tmp_path_factory.mktemp("schema")
    shutil.copy(PACKAGES, directory)
    done = subprocess.run([npm, *INSTALL], cwd=directory, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install Grafana's types here: {done.stderr[-500:]}")
    return directory


def complaints(project: Path, dashboards: dict[str, str]) -> str:
    """What the compiler says of dashboards, each written as a value of the type."""
    for name, text in dashboards.items():
        head = f'import type {{ Dashboard }} from "{TYPES}";\nexport const board: Dashboard = '
        (project / f"{name}.ts").write_text(head + text)
    compiler = project / "node_modules" / ".bin" / "tsc"
    files = [f"{name}.ts" for name in dashboards]
    done = subprocess.run([compiler, *CHECK, *files], cwd=project, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


def test_dashboards_fit_grafanas_schema(project: Path) -> None:
    assert complaints(project, {path.stem: path.read_text() for path in DASHBOARDS}) == ""


def test_the_schema_finds_what_is_wrong(project: Path) -> None:
    board = json.loads(DASHBOARDS[0].read_text())
    board["panels"][0]["gridPos"]["w"] = "wide"
    assert "Type 'string' is not assignable to type 'number'" in complaints(project, {"wrong": json.dumps(board)})
