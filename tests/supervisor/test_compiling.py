"""The first start on a machine compiles the CPU kernels: it says so, and leaves no compiler behind when it is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.compute.kernels.cpu.build import this_processor, usable_instruction_sets
from quire.foundation.processes.child_process import process_state

COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "a compiler of the test"; exit; fi
sleep 600 &
echo $! >> {pids}
wait
"""
PATIENCE_S = 120.0


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With a compiler that works through another process, like g++, and never comes to an end."""
    usable_instruction_sets(this_processor(), None)
    compiler, pids = tmp_path / "compiler", tmp_path / "pids"
    compiler.write_text(COMPILER.format(pids=pids))
    compiler.chmod(0o700)
    return {**os.environ, "CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def is_gone(pid: int) -> bool:
    return process_state(pid) in ("", None, "Z", "X")


def test_a_server_says_that_it_compiles_and_an_interrupt_ends_the_compilers(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--disable-responses-store"]
    server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if "Compiling the CPU kernels with a compiler of the test, once" in line:
            break
    pids = tmp_path / "pids"
    deadline = time.monotonic() + PATIENCE_S
    while not pids.exists() or not pids.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.send_signal(signal.SIGINT)
    server.send_signal(signal.SIGINT)
    server.communicate(timeout=PATIENCE_S)
    for pid in map(int, pids.read_text().split()):
        while not is_gone(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_an_llm_says_that_it_compiles(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "compiler").write_text("#!/bin/sh\n[ $1 = --version ] && echo a compiler of the test || exit 1\n")
    command = [sys.executable, "-c", "from quire import LLM; LLM().close()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "Compiling the CPU kernels with a compiler of the test, once" in done.stderr
    assert "CPU kernels are not used" in done.stderr
