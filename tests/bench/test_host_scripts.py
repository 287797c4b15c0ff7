"""The scripts that time the host alone run, and say what they promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("host_step.py", ["--sequences", "3", "--steps", "8"], ["worker_ms", "engine_ms"]),
        ("host_request.py", ["--tokens", "5,40", "--runs", "2"], ["40 tokens", "2,000 cached + 50", "after"]),
        ("host_request.py", ["--tokens", "5,40", "--runs", "2", "--cold"], ["launch"]),
        ("kv_waste.py", ["--requests", "40", "--blocks", "1024"], ["waste"]),
    ],
)
def test_they_run(script: str, arguments: list[str], said: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in said), done.stdout
