"""A server in a process of its own, which may be killed: `python -m tests.router.scripted_server DIRECTORY`.

Everything is real but the engine, which needs no model. Prints its address, and serves until standard input ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.api.server import running

if __name__ == "__main__":
    with running(Path(sys.argv[1]), step_s=0.02, num_blocks=8_192, max_num_seqs=256) as server:
        print(server.url, flush=True)
        sys.stdin.read()
