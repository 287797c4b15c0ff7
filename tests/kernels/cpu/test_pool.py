"""The pool's threads: a fork makes its own, and where none can be made, the caller computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.compute.kernels.cpu.library import library

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, resource, signal, torch
torch.set_num_threads(5)
from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.cpu.linear import linear, pack_linear
def threads():
    return len(os.listdir("/proc/self/task"))
weight, x = torch.ones(256, 512), torch.ones(8, 512)
def multiply():
    assert (linear(x, pack_linear(weight), None) == 512).all()
assert library()
"""
FORK = """
multiply()
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    signal.alarm(60)
    before = threads()
    multiply()
    os._exit((before, threads()) != (1, 5))
"""
NO_THREADS = """
before = threads()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**22, -1))
multiply()
assert threads() < before + 4
"""


@pytest.mark.parametrize("program", [FORK, NO_THREADS])
def test_threads(program: str) -> None:
    if library() is None:
        pytest.skip("there are no kernels")
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM + program], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
