"""Other people's programs judge what is shipped: Kubernetes' schemas, compose's schema, and a linter of Dockerfiles."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.clients.environment import environment
from tests.deploy.chart import render_chart
from tests.deploy.manifests import CHARTS, GUIDES, KUBERNETES
from tests.deploy.promql import DEPLOY

pytestmark = pytest.mark.long("operations")
NOT_OF_KUBERNETES = {"kustomization.yaml", "prometheus-adapter.yaml"}
COMPOSE = ("--builtin-schema", "vendor.compose-spec")


@pytest.fixture(scope="module")
def programs() -> Path:
    """Where they are installed."""
    try:
        return environment("tools", Path(__file__).parent)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the programs of tools.txt cannot be installed here: {error}")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command], capture_output=True, text=True, timeout=300)


def test_every_resource_fits_kubernetes_schemas(programs: Path, tmp_path: Path) -> None:
    files = [path for path in KUBERNETES.glob("*.yaml") if path.name not in NOT_OF_KUBERNETES] + [*GUIDES.iterdir()]
    for number, values in enumerate(CHARTS.values()):
        (tmp_path / f"chart-{number}.yaml").write_text(render_chart(values))
        files.append(tmp_path / f"chart-{number}.yaml")
    done = run(programs / "kubernetes-validate", "--strict", "--no-warn", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(render_chart({}).replace("periodSeconds", "periodSecond"))
    assert run(programs / "kubernetes-validate", "--strict", "--no-warn", wrong).returncode != 0


def test_compose_files_fit_their_schema(programs: Path, tmp_path: Path) -> None:
    files = sorted((DEPLOY / "docker").glob("compose*.yml"))
    done = run(programs / "check-jsonschema", *COMPOSE, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "compose.yml"
    wrong.write_text(files[-1].read_text().replace("restart:", "restarts:"))
    assert run(programs / "check-jsonschema", *COMPOSE, wrong).returncode != 0


def test_dockerfiles_pass_the_linter(programs: Path) -> None:
    done = run(programs / "hadolint", *(DEPLOY / "docker").glob("*.Dockerfile"))
    assert done.returncode == 0, done.stdout + done.stderr
