"""Virtual environments for clients whose versions conflict with each other's or with ours.

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
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
INSTALL_S = 600
_OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "PYTHONPATH": ""}


def environment(name: str, lists: Path = HERE) -> Path:
    """The directory of programs of the environment with the packages of `NAME.txt`, which is in `lists`; made if it is
    not there."""
    requirements = lists / f"{name}.txt"
    digest = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:12]
    home = Path(sys.prefix) / "client-environments"
    directory = home / f"{name}-{digest}"
    home.mkdir(exist_ok=True)
    with (home / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not (directory / "complete").exists():
            for other in home.glob(f"{name}-*"):  # of older lists, or half made
                shutil.rmtree(other)
            _install(requirements, directory)
    return directory / "bin"


def _install(requirements: Path, directory: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", directory], check=True, timeout=INSTALL_S)
    pip = [directory / "bin" / "pip", "install", "--disable-pip-version-check", "--quiet", "--no-compile", "--no-deps"]
    subprocess.run([*pip, "--requirement", requirements], check=True, timeout=INSTALL_S)
    (directory / "complete").touch()


def run_script(name: str, url: str, key: str, *, timeout: float = 120) -> Any:
    """What a script of `scripts/` saw: it prints that as JSON in its last line.

    Args:
        url: The server's.
        key: An API key.
    """
    run = subprocess.run(
        [environment("frameworks") / "python", HERE / "scripts" / f"{name}.py", url, key],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **_OFFLINE},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])
