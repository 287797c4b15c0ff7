"""Environments for clients that are not ours to install: Python packages whose versions conflict with each other's or
with ours, and npm's packages.

Made on first use, from a list of pinned packages beside this file, and kept in the environment that runs the tests.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
INSTALL_S = 600
_PUT_PROGRAMS_IN_PLACE = ("@anthropic-ai/claude-code/install.cjs", "opencode-ai/postinstall.mjs")
_OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "PYTHONPATH": ""}


def environment(name: str, lists: Path = HERE) -> Path:
    """The directory of programs of the environment with the packages of `NAME.txt`, which is in `lists`; made if it is
    not there."""
    requirements = lists / f"{name}.txt"
    return _directory(name, requirements, _install) / "bin"


def npm_environment(name: str = "npm") -> Path:
    """The directory with `node_modules` of what `NAME/package.json` lists; made if it is not there. The test is skipped
    where there is no npm."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    return _directory(name, HERE / name / "package.json", _install_from_npm)


def _directory(name: str, packages: Path, install: Callable[[Path, Path], None]) -> Path:
    """Where the packages of a list are, installed by `install(packages, directory)` if they are not yet there."""
    digest = hashlib.sha256(packages.read_bytes() + sys.version.encode()).hexdigest()[:12]
    home = Path(sys.prefix) / "client-environments"
    directory = home / f"{name}-{digest}"
    home.mkdir(exist_ok=True)
    with (home / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not (directory / "complete").exists():
            for other in home.glob(f"{name}-*"):  # of older lists, or half made
                shutil.rmtree(other)
            install(packages, directory)
            (directory / "complete").touch()
    return directory


def _install(requirements: Path, directory: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", directory], check=True, timeout=INSTALL_S)
    pip = [directory / "bin" / "pip", "install", "--disable-pip-version-check", "--quiet", "--no-compile", "--no-deps"]
    subprocess.run([*pip, "--requirement", requirements], check=True, timeout=INSTALL_S)


def _install_from_npm(packages: Path, directory: Path) -> None:
    directory.mkdir()
    shutil.copy(packages, directory)
    npm = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock", "--silent"]
    subprocess.run(npm, cwd=directory, check=True, timeout=INSTALL_S)
    for name in _PUT_PROGRAMS_IN_PLACE:  # npm runs scripts of packages or not, depending on its version
        if (script := directory / "node_modules" / name).exists():
            subprocess.run(["node", script], check=True, timeout=INSTALL_S)


def run_script(name: str, url: str, key: str, *arguments: str, timeout: float = 120) -> Any:
    """What a script of `scripts/` saw: it prints that as JSON in its last line.

    Args:
        url: The server's.
        key: An API key.
        arguments: Further ones of this script.
    """
    program = [environment("frameworks") / "python", HERE / "scripts" / f"{name}.py"]
    return _last_line([*program, url, key, *arguments], timeout)


def run_npm_script(name: str, *arguments: str, timeout: float = 120, packages: str = "npm") -> Any:
    """What a script of the directory `packages` saw: it prints that as JSON in its last line."""
    script = npm_environment(packages) / f"{name}.mjs"  # beside the packages that it imports
    shutil.copy(HERE / packages / script.name, script)
    return _last_line(["node", script, *arguments], timeout)


def _last_line(command: list[str | Path], timeout: float) -> Any:
    environ = {**os.environ, **_OFFLINE}
    run = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environ)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])
