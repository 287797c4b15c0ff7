"""What an image's build is given is enough to install Quire from: the same files in an empty directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.deploy.promql import ROOT

ONLY_HERE = ("__pycache__", "*.pyc")


@pytest.mark.long("operations")
def test_the_build_context_installs(tmp_path: Path) -> None:
    context, wheels, home = tmp_path / "src", tmp_path / "wheels", tmp_path / "installed"
    context.mkdir()
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            source = ROOT / line[1:]
            if source.is_dir():
                shutil.copytree(source, context / source.name, ignore=shutil.ignore_patterns(*ONLY_HERE))
            else:
                shutil.copy(source, context)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", wheels, "."]
    done = subprocess.run(build, cwd=context, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.iterdir()
    zipfile.ZipFile(wheel).extractall(home)
    shipped = {path.relative_to(ROOT) for path in (ROOT / "quire").rglob("*") if path.is_file()}
    missing = {
        str(path) for path in shipped if not (home / path).exists() and path.suffix not in (".pyc", ".md", ".so")
    }
    assert missing == set()
    command = [sys.executable, "-m", "quire", "serve", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(home)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "--otlp-traces-endpoint" in done.stdout
    where = subprocess.run(
        [sys.executable, "-c", "import quire; print(quire.__file__)"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert where.stdout.startswith(str(home))
