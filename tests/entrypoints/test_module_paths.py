"""The module paths that guides type lead to the same commands."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "program"),
    [
        ("quire.entrypoints.openai.api_server", "quire serve"),
        ("quire.entrypoints.openai.run_batch", "quire run-batch"),
        ("quire.benchmark_throughput", "quire bench throughput"),
        ("quire.benchmark_latency", "quire bench latency"),
    ],
)
def test_a_module_is_its_command(module: str, program: str) -> None:
    command = [sys.executable, "-m", module, "--max-modl-len", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert done.stderr == f"quire: error: --max-modl-len is not a flag of {program}. Did you mean --max-model-len?\n"
