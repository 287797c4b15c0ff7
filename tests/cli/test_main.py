"""The `quire` command itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SWALLOWS = """
import os, signal, time
for _ in range(2):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except BaseException:  # as in a callback of the import system, or in a library
        pass

def run(arguments):
    return 0
"""
COMMAND = """
from quire.cli import main
main.COMMANDS["swallow"] = ("swallows", "")
main.main(["swallow"])
"""


def test_an_interrupt_while_a_command_is_imported_ends_it_whatever_is_imported(tmp_path: Path) -> None:
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{COMMAND}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
