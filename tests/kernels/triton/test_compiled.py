"""The kernels compile for a card: the interpreter, which other tests run them in, takes more than the compiler does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a card, every test compiles what it runs")
def test_every_case_of_the_benchmark_compiles() -> None:
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.compile_cases"]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "rms_norm" in done.stdout.split()
