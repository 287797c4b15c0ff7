"""Programs that compile kernels, in processes of their own, since in those of tests kernels are interpreted; and what a
compiled kernel takes of a card.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def printed_by(module: str, *arguments: str, **settings: str) -> str:
    """What `python -m module` prints; `settings` are added to its environment. It must succeed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | settings
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=Path.cwd())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def taken(kernel: Any, resource: str) -> int:
    """By a thread of a compiled kernel: registers (REG), or bytes of a stack, which are spilled registers (STACK)."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    usage = re.search(rf"{resource}:(\d+)", said.stdout + said.stderr)
    assert usage is not None, said.stdout
    return int(usage[1])
